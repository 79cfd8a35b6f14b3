// Sequences as bars on one scale. A row keeps its place as long as its sequence lives.

import { hue, legend } from "./draw.js";
import { count, make, tell } from "./elements.js";

const ENDED_FOR_MS = 3000; // a row outlives its sequence
const FLASH_MS = 1500;
const MOST_ROWS = 160; // with more, the ended ones go at once
const LEGEND = { cached: "in the cache", prefill: "prefilled", todo: "to prefill", decode: "generated", most: "at most" };

export class Bars {
	constructor(live) {
		this.live = live;
		this.rows = [];
		this.scale = { most: 64, power: 1 };
		this.about = make("span");
		this.list = make("ol", { className: "bars", onkeydown: (event) => this.step(event) });
		this.list.addEventListener("focusin", (event) => this.stop(event.target));
		this.more = make("p");
		this.node = make("section", {}, make("h3", {}, "Sequences ", this.about), legend(LEGEND), this.list, this.more);
	}

	show({ sequences = [], num_running = 0, num_waiting = 0 }) {
		const now = performance.now();
		const { lives } = this.live;
		const alive = new Set(sequences.map((one) => one.sequence_id));
		if (alive.size) this.rescale([...alive].map((id) => lives.get(id)));
		for (const row of this.rows) row.endedAt = alive.has(row.id) ? Infinity : Math.min(row.endedAt, now);
		const seated = new Set(this.rows.map((row) => row.id));
		for (const id of alive) if (!seated.has(id)) this.seat(id);
		for (const [id, life] of lives) if (life.isBrief) this.seat(id, now), (life.isBrief = false);
		const endedForMs = this.rows.length > MOST_ROWS ? 0 : ENDED_FOR_MS;
		for (const row of this.taken()) {
			row.life = lives.get(row.id) ?? row.life;
			if (now - row.endedAt >= endedForMs && !row.isLookedAt()) row.begin(null);
			else row.paint(this.scale, now);
		}
		while (this.rows.at(-1)?.id === null) this.rows.pop().item.remove();
		const taken = this.taken();
		if (!taken.some((row) => row.button.tabIndex === 0)) this.stop(taken[0]?.button);
		const untold = num_running + num_waiting - alive.size;
		tell(this.more, untold > 0 ? `and ${count(untold)} more wait` : "");
		if (taken.some((row) => row.endedAt < Infinity || row.isFlashing(now))) this.live.wake(250);
	}

	taken() {
		return this.rows.filter((row) => row.id !== null);
	}

	// It seldom changes. What is known has a quarter of the width at least: longer outlines are open at the right. Where
	// the longest is many times the shortest it is a scale of square roots.
	rescale(lives) {
		const { scale } = this;
		const known = Math.max(...lives.map((life) => life.num_prompt_tokens + life.num_output_tokens));
		const ends = lives.map((life) => life.num_prompt_tokens + life.max_tokens);
		const wanted = Math.max(64, Math.min(Math.max(...ends), 4 * known));
		const step = 2 ** (Math.ceil(Math.log2(wanted)) - 3);
		if (wanted > scale.most || wanted < scale.most / 2) scale.most = Math.ceil(wanted / step) * step;
		const spread = known / Math.min(...ends);
		if (spread > 6 || spread < 2) scale.power = spread > 6 ? 0.5 : 1;
		tell(this.about, `0 to ${count(scale.most)} tokens${scale.power < 1 ? ", a scale of square roots" : ""}`);
	}

	seat(id, endedAt) {
		let row = this.rows.find((candidate) => candidate.id === null);
		if (!row) {
			this.rows.push((row = new Row(this.live)));
			this.list.append(row.item);
		}
		row.begin(id, endedAt);
	}

	// One row is a stop of the Tab key, the arrows go to the others: 128 stops would be a wall.
	stop(button) {
		for (const row of this.rows) row.button.tabIndex = row.button === button ? 0 : -1;
	}

	step(event) {
		const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
		if (!by) return;
		event.preventDefault();
		const buttons = this.taken().map((row) => row.button);
		buttons[buttons.indexOf(event.target) + by]?.focus();
	}

	focus(id) {
		this.rows.find((row) => row.id === id)?.button.focus();
	}
}

class Row {
	constructor(live) {
		this.live = live;
		this.cells = ["name", "state", "tokens", "numbers"].map((className) => make("span", { className }));
		this.button = make("button", { type: "button", onclick: () => live.select(this.id) }, ...this.cells);
		this.item = make("li", {}, this.button);
	}

	// null: for nobody.
	begin(id, endedAt = Infinity) {
		Object.assign(this, { id, life: null, endedAt });
		Object.assign(this.button, { hidden: id === null, tabIndex: -1 });
		this.button.style.setProperty("--hue", hue(id));
	}

	isLookedAt() {
		return this.button === document.activeElement || this.id === this.live.selected;
	}

	isFlashing(now) {
		return this.endedAt === Infinity && now - this.life.preemptedAt < FLASH_MS;
	}

	paint({ most, power }, now) {
		const { state, end, num_prompt_tokens: prompt, num_output_tokens: output, max_tokens, num_preemptions } = this.life;
		const ended = this.endedAt < Infinity;
		const known = prompt + output;
		// The newest token's keys and values come with the next step: no gap is worth seeing.
		const computed = Math.min(known, this.life.num_computed_tokens + (state === "decode"));
		const share = (tokens) => `${(100 * (tokens / most) ** power).toFixed(1)}%`;
		const pale = (name) => `color-mix(in srgb, var(--${name}) 30%, transparent)`; // in no block, or in none any more
		const pieces = [
			["var(--cached)", Math.min(this.life.num_cached_tokens, computed)],
			["var(--prefill)", Math.min(computed, prompt)],
			[pale("prefill"), prompt],
			["var(--decode)", Math.max(computed, prompt)],
			[pale("decode"), known],
		];
		const colours = pieces.map(([colour, to]) => `${colour} 0 ${share(to)}`).join();
		const [name, word, tokens, numbers] = this.cells;
		const mine = this.live.requests.has(this.life.request_id);
		const full = prompt + max_tokens;
		const flags = { mine, ended, flash: this.isFlashing(now), open: full > most };
		for (const [flag, is] of Object.entries(flags)) this.button.classList.toggle(flag, is);
		tokens.style.setProperty("background", `linear-gradient(90deg, ${colours}, transparent 0)`);
		tokens.style.setProperty("--most", share(full));
		tell(name, `#${this.id}${mine ? " yours" : ""}`);
		const waits = state === "waiting" && num_preemptions ? "preempted" : state;
		tell(word, ended ? (end?.finish_reason ?? "not told") : waits);
		const [done, all] = state === "decode" || end ? [output, max_tokens] : [computed, known];
		tell(numbers, `${count(done)}/${count(all)}`);
		// Without numbers: some screen readers say whatever changes in a focused name.
		this.button.ariaLabel = `Sequence ${this.id}${mine ? ", yours" : ""}: ${word.textContent}`;
		this.button.ariaExpanded = this.id === this.live.selected;
	}
}
