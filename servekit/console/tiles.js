// The numbers on top: each in large, and below what it is of.

import { count, make, seconds, tell } from "./elements.js";

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const short = (number = 0) => (number < 1e4 ? count(number) : COMPACT.format(number));
const percent = (part = 0, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

const TILES = {
	generated: (s) => [count(Math.round(s.tokens_per_s)), "tokens/s"],
	running: (s) => [short(s.num_running), `of ${short(s.limits?.max_num_seqs)} seats`],
	waiting: (s) => [short(s.num_waiting), "in line"],
	"KV blocks in use": ({ limits, num_free_blocks: free = 0, num_cached_blocks: cached = 0 }) => {
		const all = limits?.num_blocks ?? 0;
		return [percent(all - free - cached, all), `${short(all - free - cached)} of ${short(all)}`];
	},
	"prefix hits": (s) => [percent(s.num_cached_tokens, s.num_prompt_tokens), `of ${short(s.num_prompt_tokens)} tokens`],
	"TTFT p50": (s) => [seconds(s.ttft_p50_s), `p95 ${seconds(s.ttft_p95_s)}`],
	preemptions: (s) => [short(s.num_preemptions), `in ${short(s.num_steps)} steps`],
	workers: ({ workers }) => {
		const about = workers.map((one) => [one.device, one.dtype, one.attention].filter(Boolean).join(" · "));
		return [workers.map((one) => one.state).join(), [...new Set(about)].join("; ")];
	},
};

export class Tiles {
	constructor() {
		this.node = make("dl", { className: "tiles" });
		this.parts = Object.keys(TILES).map((name) => {
			const parts = [make("b"), make("small")];
			this.node.append(make("div", {}, make("dt", {}, name), make("dd", {}, ...parts)));
			return parts;
		});
	}

	show(state) {
		const told = Object.values(TILES).map((read) => read({ tokens_per_s: 0, ...state }));
		told.forEach((words, index) => words.forEach((text, part) => tell(this.parts[index][part], text)));
	}
}
