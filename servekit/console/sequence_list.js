// The sequences as rows with bars on one scale. A row keeps its place as long as its sequence runs or waits.

import { createLegend, sequenceHue } from "./chart.js";
import { createElement, setText } from "./dom.js";
import { formatCount } from "./format.js";

const SHOW_ENDED_MS = 3000; // how long a row stays after the end of its sequence
const FLASH_MS = 1500; // how long a preempted sequence is marked
const MAX_ROWS = 160; // with more rows, those of ended sequences are removed at once; a frame has 128 sequences at most
const FADE_CHECK_MS = 250; // how often rows that are to fade are looked at, if no frame comes
const MIN_SCALE_TOKENS = 64;
// The scale is linear as long as this many tokens take this share of the width. Beyond, it is a power function on which
// they do: or short sequences would have no visible bar beside a context of 100,000 tokens.
const SHORT_TOKENS = 256;
const MIN_SHORT_SHARE = 1 / 8;

const LEGEND = {
	cached: "from the cache",
	prefill: "prefilled",
	todo: "to prefill",
	decode: "generated",
	drafted: "generated from drafts",
	limit: "at most",
};

export class SequenceList {
	rows = []; // in the order of their places; a row without a sequence is a gap
	scale = { maxTokens: MIN_SCALE_TOKENS, exponent: 1 };

	constructor(view) {
		this.view = view;
		this.subtitle = createElement("span");
		this.list = createElement("ol", { className: "sequences" });
		this.list.addEventListener("keydown", (event) => this.#onKeyDown(event));
		this.list.addEventListener("focusin", (event) => this.#setTabStop(event.target));
		this.remainder = createElement("p", { className: "remainder" });
		const heading = createElement("h3", {}, "Sequences ", this.subtitle);
		this.node = createElement("section", {}, heading, createLegend(LEGEND), this.list, this.remainder);
	}

	show({ sequences = [], num_running: numRunning = 0, num_waiting: numWaiting = 0 }) {
		const nowMs = performance.now();
		const aliveIds = new Set(sequences.map((sequence) => sequence.sequence_id));
		for (const row of this.rows) row.endedAtMs = aliveIds.has(row.sequenceId) ? Infinity : Math.min(row.endedAtMs, nowMs);
		this.#addRows(aliveIds, nowMs);
		this.#updateRecordsAndRemoveEnded(nowMs);
		const rows = this.usedRows();
		this.#updateScale(rows.map((row) => row.record));
		for (const row of rows) row.paint(this.scale, nowMs);
		if (!rows.some((row) => row.button.tabIndex === 0)) this.#setTabStop(rows[0]?.button);
		const numMore = numRunning + numWaiting - aliveIds.size; // running sequences come first, so these wait
		setText(this.remainder, numMore > 0 ? `and ${formatCount(numMore)} more waiting` : "");
		if (rows.some((row) => row.isEnded || row.isFlashing(nowMs))) this.view.redrawAfter(FADE_CHECK_MS);
	}

	usedRows() {
		return this.rows.filter((row) => row.sequenceId !== null);
	}

	#addRows(aliveIds, nowMs) {
		const shownIds = new Set(this.rows.map((row) => row.sequenceId));
		for (const sequenceId of aliveIds) {
			if (!shownIds.has(sequenceId)) this.#freeRow().assign(sequenceId, Infinity);
		}
		// These began and ended between two frames.
		const { unseenIds } = this.view.history;
		for (const sequenceId of unseenIds) this.#freeRow().assign(sequenceId, nowMs);
		unseenIds.clear();
	}

	// The first gap, or a new row at the end.
	#freeRow() {
		const gap = this.rows.find((row) => row.sequenceId === null);
		if (gap) return gap;
		const row = new SequenceRow(this.view);
		this.rows.push(row);
		this.list.append(row.item);
		return row;
	}

	#updateRecordsAndRemoveEnded(nowMs) {
		const showEndedMs = this.rows.length > MAX_ROWS ? 0 : SHOW_ENDED_MS;
		for (const row of this.usedRows()) {
			row.record = this.view.history.get(row.sequenceId) ?? row.record;
			if (nowMs - row.endedAtMs >= showEndedMs && !row.isInUse()) row.clear();
		}
		while (this.rows.at(-1)?.sequenceId === null) this.rows.pop().item.remove();
	}

	// The scale covers the prompt and max_tokens of every row. These are fixed, so the scale changes when sequences come
	// and go, and never because one grows. It changes seldom: it is rounded up, and shrinks only to less than half.
	#updateScale(records) {
		if (records.length) {
			const wanted = Math.max(MIN_SCALE_TOKENS, ...records.map((record) => record.num_prompt_tokens + record.max_tokens));
			const { maxTokens } = this.scale;
			if (wanted > maxTokens || wanted < maxTokens / 2) this.scale = scaleFor(wanted);
		}
		const nonLinear = this.scale.exponent < 1 ? ", non-linear scale" : "";
		setText(this.subtitle, `0 to ${formatCount(this.scale.maxTokens)} tokens${nonLinear}`);
	}

	// One row is a stop of the Tab key, and the arrow keys lead to the others: 128 stops would be too many to pass.
	#setTabStop(button) {
		for (const row of this.rows) row.button.tabIndex = row.button === button ? 0 : -1;
	}

	#onKeyDown(event) {
		const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
		if (!step) return;
		event.preventDefault();
		const buttons = this.usedRows().map((row) => row.button);
		buttons[buttons.indexOf(event.target) + step]?.focus();
	}

	focusRow(sequenceId) {
		this.rows.find((row) => row.sequenceId === sequenceId)?.button.focus();
	}
}

function scaleFor(wantedTokens) {
	const step = 2 ** (Math.floor(Math.log2(wantedTokens)) - 2); // at most a quarter more than wanted
	const maxTokens = Math.ceil(wantedTokens / step) * step;
	const isLinear = SHORT_TOKENS / maxTokens >= MIN_SHORT_SHARE;
	const exponent = isLinear ? 1 : Math.log(MIN_SHORT_SHARE) / Math.log(SHORT_TOKENS / maxTokens);
	return { maxTokens, exponent };
}

class SequenceRow {
	sequenceId = null;
	record = null; // of the sequence history
	endedAtMs = Infinity; // the page's time

	constructor(view) {
		this.view = view;
		this.name = createElement("span", { className: "name" });
		this.state = createElement("span", { className: "state" });
		this.bar = createElement("span", { className: "bar-of-tokens" });
		this.numbers = createElement("span", { className: "numbers" });
		const properties = { type: "button", onclick: () => view.select(this.sequenceId) };
		this.button = createElement("button", properties, this.name, this.state, this.bar, this.numbers);
		this.item = createElement("li", {}, this.button);
	}

	get isEnded() {
		return this.endedAtMs < Infinity;
	}

	assign(sequenceId, endedAtMs) {
		this.sequenceId = sequenceId;
		this.record = null;
		this.endedAtMs = endedAtMs;
		this.button.hidden = false;
		this.button.tabIndex = -1;
		this.button.style.setProperty("--hue", sequenceHue(sequenceId));
	}

	clear() {
		this.sequenceId = null;
		this.record = null;
		this.endedAtMs = Infinity;
		this.button.hidden = true;
		this.button.tabIndex = -1;
	}

	// The row of an ended sequence stays while it has the focus or its details are open.
	isInUse() {
		return this.button === document.activeElement || this.sequenceId === this.view.selectedId;
	}

	isFlashing(nowMs) {
		return !this.isEnded && nowMs - this.record.preemptedAtMs < FLASH_MS;
	}

	paint(scale, nowMs) {
		const { record } = this;
		const isOwn = this.view.ownRequestIds.has(record.request_id);
		this.button.classList.toggle("own", isOwn);
		this.button.classList.toggle("ended", this.isEnded);
		this.button.classList.toggle("flash", this.isFlashing(nowMs));
		this.#paintBar(scale);
		setText(this.name, `#${this.sequenceId}${isOwn ? " yours" : ""}`);
		setText(this.state, this.#stateText());
		setText(this.numbers, this.#numbersText());
		// Without numbers: some screen readers announce each change in the name of the focused element.
		this.button.ariaLabel = `Sequence ${this.sequenceId}${isOwn ? ", yours" : ""}: ${this.state.textContent}`;
		this.button.ariaExpanded = String(this.sequenceId === this.view.selectedId);
	}

	#stateText() {
		const { state, end, num_preemptions: numPreemptions } = this.record;
		if (this.isEnded) return end?.finish_reason ?? "unknown"; // a frame reports the last 64 ends
		return state === "waiting" && numPreemptions ? "preempted" : state;
	}

	// Generated tokens of max_tokens; during prefill, computed tokens of those that are known.
	#numbersText() {
		const { state, end, num_output_tokens: numOutput, max_tokens: maxTokens, num_prompt_tokens: numPrompt } = this.record;
		const [done, all] = state === "decode" || end ? [numOutput, maxTokens] : [this.#numComputed(), numPrompt + numOutput];
		return `${formatCount(done)}/${formatCount(all)}`;
	}

	// The newest token's keys and values are computed by the next step. In decode it counts as computed, or each bar would
	// have a gap of one token at its end.
	#numComputed() {
		const { state, num_prompt_tokens, num_output_tokens, num_computed_tokens } = this.record;
		return Math.min(num_prompt_tokens + num_output_tokens, num_computed_tokens + (state === "decode" ? 1 : 0));
	}

	#paintBar({ maxTokens, exponent }) {
		const { num_prompt_tokens: numPrompt, num_output_tokens: numOutput, num_cached_tokens: numCached } = this.record;
		const numComputed = this.#numComputed();
		const numDecoded = Math.max(numComputed, numPrompt);
		const shareOf = (numTokens) => `${(100 * (numTokens / maxTokens) ** exponent).toFixed(1)}%`;
		// Each segment ends at a number of tokens. Pale ones have no KV blocks yet, or lost them by preemption.
		const segments = [
			["var(--cached)", Math.min(numCached, numComputed)],
			["var(--prefill)", Math.min(numComputed, numPrompt)],
			["var(--prefill-pale)", numPrompt],
			["var(--decode)", Math.max(numDecoded - this.record.num_accepted_tokens, numPrompt)],
			["var(--drafted)", numDecoded],
			["var(--decode-pale)", numPrompt + numOutput],
		];
		const stops = segments.map(([colour, end]) => `${colour} 0 ${shareOf(end)}`);
		this.bar.style.setProperty("background", `linear-gradient(90deg, ${stops.join(", ")}, transparent 0)`);
		this.bar.style.setProperty("--limit", shareOf(numPrompt + this.record.max_tokens));
	}
}
