// The newest steps as columns. At the top all tokens of a step, prefill stacked on decode, up to the token budget. That axis
// is logarithmic: on a linear one, 30 decode tokens beside 2,048 of prefill are a flat line. It shows little of how the number
// of decode tokens changes, so below they are drawn once more, on a linear axis of their own.

import { Chart } from "./chart.js";
import { createElement, setText } from "./dom.js";
import { formatCount, formatSeconds } from "./format.js";
import {
	DURATION_S,
	MAX_STEPS,
	NUM_DECODE_TOKENS,
	NUM_PREFILL_TOKENS,
	NUM_SEQUENCES,
	numTokens,
	STEP_ID,
} from "./step_history.js";

const NUM_COLUMNS = 200;
// How many steps are shown. With more than one for each column, a column is the largest of its steps.
const WINDOWS = [NUM_COLUMNS, 2_000, MAX_STEPS];
const GUTTER = 46; // for the axis labels; in CSS pixels, like the next three
const PADDING_TOP = 8;
const PADDING_BOTTOM = 5;
const LABEL_HEIGHT = 12;
const MIN_AXIS_TOKENS = 8;

export class StepChart extends Chart {
	groupSize = 1; // steps for each column
	groups = new Map(); // by group number, as StepHistory gives them; a group number is this chart's key
	lastGroup = -1;

	constructor(view) {
		super(view, "Steps", { prefill: "prefill tokens", decode: "decode tokens", "prefill-limit": "prefill limit" });
		const options = WINDOWS.map((value) => createElement("option", { value }, `last ${formatCount(value)} steps`));
		this.windowSelect = createElement("select", { ariaLabel: "Steps shown" }, ...options);
		this.windowSelect.onchange = () => {
			this.groupSize = Number(this.windowSelect.value) / NUM_COLUMNS;
			this.setKey(null);
		};
		this.header.append(this.windowSelect);
	}

	show({ limits, prefill_limit: prefillLimit = 0 }) {
		const { stepHistory } = this.view;
		this.groups = stepHistory.groups(this.groupSize, NUM_COLUMNS);
		this.lastGroup = stepHistory.lastGroup(this.groupSize);
		const budget = limits?.max_num_batched_tokens ?? 0;
		setText(this.subtitle, budget ? `budget ${formatCount(budget)} tokens each, logarithmic` : "");
		this.#draw(budget, prefillLimit);
		setText(this.readout, this.describe(this.key));
		this.setLabel(this.#label());
	}

	#label() {
		const newest = this.view.frame.steps ?? [];
		const sum = (field) => formatCount(newest.reduce((total, step) => total + step[field], 0));
		const tokens = `${sum(NUM_PREFILL_TOKENS)} prefill and ${sum(NUM_DECODE_TOKENS)} decode tokens`;
		return `The last ${formatCount(newest.length)} steps: ${tokens}.`;
	}

	#draw(budget, prefillLimit) {
		this.beginDrawing();
		const { pen, canvas, pixelRatio } = this;
		const groups = [...this.groups.entries()];
		const upper = new LogarithmicAxis(
			PADDING_TOP * pixelRatio,
			Math.round(0.62 * canvas.height),
			Math.max(budget, MIN_AXIS_TOKENS, ...groups.map(([, group]) => numTokens(group.largest))),
		);
		const peakDecodeTokens = Math.max(MIN_AXIS_TOKENS, ...groups.map(([, group]) => group.maxDecodeTokens));
		const lower = new LinearAxis(
			Math.round(0.72 * canvas.height),
			canvas.height - PADDING_BOTTOM * pixelRatio,
			2 ** Math.ceil(Math.log2(peakDecodeTokens)), // a power of two changes seldom
		);
		for (let tick = 10; upper.yOf(tick) > upper.top + LABEL_HEIGHT * pixelRatio; tick *= 10) {
			this.#drawAxisLine(upper.yOf(tick), formatCount(tick), "line");
		}
		for (const axis of [upper, lower]) this.#drawAxisLine(axis.floor, "0", "line");
		this.#drawAxisLine(lower.top, formatCount(lower.max), "line");
		const prefillColour = this.cssColour("prefill");
		const decodeColour = this.cssColour("decode");
		for (const [number, { largest, maxDecodeTokens }] of groups) {
			const [x, width] = this.columnOf(number);
			const height = upper.heightOf(numTokens(largest));
			const decodeHeight = upper.heightOf(largest[NUM_DECODE_TOKENS]);
			const lowerHeight = lower.heightOf(maxDecodeTokens);
			pen.globalAlpha = largest[DURATION_S] == null ? 0.5 : 1; // in flight, or lost with its worker
			this.fillRect(prefillColour, x, upper.floor - height, width, height - decodeHeight);
			this.fillRect(decodeColour, x, upper.floor - decodeHeight, width, decodeHeight);
			this.fillRect(decodeColour, x, lower.floor - lowerHeight, width, lowerHeight);
			pen.globalAlpha = 1;
			if (number === this.key) {
				pen.strokeStyle = this.cssColour("ink");
				pen.strokeRect(x - pixelRatio, upper.top, width + 2 * pixelRatio, lower.floor - upper.top);
			}
		}
		this.#drawPrefillLimit(upper, prefillLimit);
		// The budget comes last, so that no column hides it.
		this.#drawAxisLine(upper.top, formatCount(upper.max), "warn");
	}

	#drawAxisLine(y, label, colour) {
		const left = GUTTER * this.pixelRatio;
		this.fillRect(this.cssColour(colour), left, y, this.canvas.width - left, this.pixelRatio);
		this.#drawAxisLabel(y, label);
	}

	#drawAxisLabel(y, label) {
		this.pen.fillStyle = this.cssColour("muted");
		this.pen.textAlign = "right";
		this.pen.fillText(label, (GUTTER - 4) * this.pixelRatio, y + 4 * this.pixelRatio);
	}

	// How many prefill tokens the scheduler allows the next step, where that is less than the budget.
	#drawPrefillLimit(axis, prefillLimit) {
		if (!prefillLimit || prefillLimit >= axis.max) return;
		const dash = 3 * this.pixelRatio;
		for (let x = GUTTER * this.pixelRatio; x < this.canvas.width; x += 2 * dash) {
			this.fillRect(this.cssColour("muted"), x, axis.yOf(prefillLimit), dash, this.pixelRatio);
		}
	}

	// Where the column of a group begins and how wide it is, in device pixels. The newest is at the right.
	columnOf(number) {
		const left = GUTTER * this.pixelRatio;
		const place = NUM_COLUMNS - 1 - (this.lastGroup - number);
		const edge = (at) => Math.round(left + (at * (this.canvas.width - left)) / NUM_COLUMNS);
		const width = edge(place + 1) - edge(place);
		return [edge(place), width > 3 ? width - 1 : width]; // a gap between columns where there is room for one
	}

	keyAt(x) {
		const left = GUTTER * this.pixelRatio;
		const place = Math.floor(((x - left) / (this.canvas.width - left)) * NUM_COLUMNS);
		const number = this.lastGroup - (NUM_COLUMNS - 1) + place;
		return this.groups.has(number) ? number : null;
	}

	moveKey(key, dx) {
		const numbers = [...this.groups.keys()].sort((one, other) => one - other);
		if (!this.groups.has(key)) return numbers.at(-1) ?? null;
		return numbers[numbers.indexOf(key) + dx] ?? key;
	}

	describe(key) {
		const group = this.groups.get(key) ?? this.groups.get(this.lastGroup);
		if (!group) return "No step yet.";
		const { firstId, lastId, largest } = group;
		const [stepId, prefill, decode, sequences] = [STEP_ID, NUM_PREFILL_TOKENS, NUM_DECODE_TOKENS, NUM_SEQUENCES].map(
			(field) => formatCount(largest[field]),
		);
		const duration = largest[DURATION_S] == null ? "in flight" : formatSeconds(largest[DURATION_S]);
		const step = `${prefill} prefill + ${decode} decode tokens, ${sequences} sequences, ${duration}`;
		if (firstId === lastId) return `Step ${stepId}: ${step}`;
		return `Steps ${formatCount(firstId)} to ${formatCount(lastId)}; the largest, step ${stepId}: ${step}`;
	}
}

// From y = `floor` for 0 tokens up to y = `top` for `max` tokens, in device pixels.
class LinearAxis {
	constructor(top, floor, max) {
		Object.assign(this, { top, floor, max });
	}

	fractionOf(numTokens) {
		return numTokens / this.max;
	}

	// At least one pixel for what is not 0.
	heightOf(numTokens) {
		return numTokens && Math.max(1, Math.round((this.floor - this.top) * this.fractionOf(numTokens)));
	}

	yOf(numTokens) {
		return this.floor - this.heightOf(numTokens);
	}
}

class LogarithmicAxis extends LinearAxis {
	// With + 1, so that 0 tokens have no height.
	fractionOf(numTokens) {
		return Math.log(1 + numTokens) / Math.log(1 + this.max);
	}
}
