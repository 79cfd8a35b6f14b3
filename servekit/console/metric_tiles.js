// The tiles at the top of the scheduler view: a value in large type, and below it what the value refers to.

import { createElement, setText } from "./dom.js";
import { formatCompact, formatCount, formatPercent, formatSeconds } from "./format.js";

const MAX_ADAPTERS = 3;
const OF_ALL_KINDS = ["waiting", "workers"]; // tiles of models that generate no text, too

export function generatesText({ kind = "generate" }) {
	return kind === "generate";
}

// The LoRA adapters with most requests, as "name requests".
function describeAdapters(adapters) {
	const names = (adapters?.in_use ?? []).map(([name, number]) => `${name} ${formatCount(number)}`);
	return names.length > MAX_ADAPTERS ? [...names.slice(0, MAX_ADAPTERS), "…"] : names;
}

// {label: frame -> [value, reference]}
const TILES = {
	generated: ({ tokens_per_s: tokensPerS = 0, num_drafted_tokens: numDrafted, num_accepted_tokens: numAccepted }) => [
		formatCount(Math.round(tokensPerS)),
		numDrafted ? `tokens/s, drafts ${formatPercent(numAccepted, numDrafted)} right` : "tokens/s",
	],
	running: ({ num_running, limits, adapters }) => [
		formatCompact(num_running),
		[`of ${formatCompact(limits?.max_num_seqs)} slots`, ...describeAdapters(adapters)].join(", "),
	],
	waiting: ({ num_waiting }) => [formatCompact(num_waiting), "in the queue"],
	"KV blocks in use": ({ limits, num_free_blocks: numFree = 0, num_cached_blocks: numCached = 0 }) => {
		const numBlocks = limits?.num_blocks ?? 0;
		const numUsed = numBlocks - numFree - numCached;
		return [formatPercent(numUsed, numBlocks), `${formatCompact(numUsed)} of ${formatCompact(numBlocks)}`];
	},
	"prefix cache hits": ({ num_cached_tokens, num_prompt_tokens }) => [
		formatPercent(num_cached_tokens, num_prompt_tokens),
		`of ${formatCompact(num_prompt_tokens)} tokens`,
	],
	"TTFT p50": ({ ttft_p50_s, ttft_p95_s }) => [formatSeconds(ttft_p50_s), `p95 ${formatSeconds(ttft_p95_s)}`],
	preemptions: ({ num_preemptions, num_steps }) => [formatCompact(num_preemptions), `in ${formatCompact(num_steps)} steps`],
	workers: ({ workers }) => {
		const kinds = workers.map(({ device, host, dtype, attention }) =>
			[host ? `${device} on ${host}` : device, dtype, attention].filter(Boolean).join(" · "),
		);
		const kind = [...new Set(kinds)].filter(Boolean).join("; ");
		if (workers.length === 1) return [workers[0].state, kind];
		const numServing = workers.filter(({ state }) => state === "serving").length;
		const loads = workers.map(({ num_running: running = 0, num_waiting: waiting = 0 }) => `${running}+${waiting}`);
		return [`${numServing} of ${workers.length} serving`, `running+waiting ${loads.join(", ")}; ${kind}`];
	},
};

export class MetricTiles {
	constructor() {
		this.node = createElement("dl", { className: "tiles" });
		this.tiles = Object.entries(TILES).map(([label, read]) => {
			const value = createElement("b");
			const reference = createElement("small");
			const node = createElement("div", {}, createElement("dt", {}, label), createElement("dd", {}, value, reference));
			this.node.append(node);
			return { label, node, read, value, reference };
		});
	}

	show(frame) {
		for (const tile of this.tiles) {
			tile.node.hidden = !generatesText(frame) && !OF_ALL_KINDS.includes(tile.label);
			const [value, reference] = tile.read(frame);
			setText(tile.value, value);
			setText(tile.reference, reference);
		}
	}
}
