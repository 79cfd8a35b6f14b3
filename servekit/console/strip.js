// The last 200 steps, a column each: above, their tokens stacked against the budget. Beside 2,048 tokens of prefill, 30 of
// decode are a line, so these stand once more below, on a scale of their own.

import { Picture } from "./draw.js";
import { count, seconds, tell } from "./elements.js";

const COLUMNS = 200;
const GUTTER = 46; // pixels of CSS for the axis
const [ID, PREFILL, DECODE, SEQUENCES, DURATION] = [0, 2, 3, 4, 5]; // a LiveStep's fields

export class Strip extends Picture {
	steps = [];

	constructor(live) {
		super(live, "Steps", { prefill: "prefill tokens", decode: "decode tokens" });
	}

	show({ steps = [], limits }) {
		this.steps = steps;
		const budget = limits?.max_num_batched_tokens ?? 1;
		tell(this.about, `the last ${COLUMNS}, against a budget of ${count(budget)} tokens each`);
		this.draw(budget);
		tell(this.line, this.words(this.key));
		const sum = (field) => count(steps.reduce((total, step) => total + step[field], 0));
		this.canvas.ariaLabel = `The last ${steps.length} steps: ${sum(PREFILL)} prefill and ${sum(DECODE)} decode tokens.`;
	}

	draw(budget) {
		const { pen, unit, width, height } = this.begin();
		const left = GUTTER * unit;
		const [top, floor, roof, bottom] = [8 * unit, Math.round(0.62 * height), Math.round(0.72 * height), height - 5 * unit];
		const most = 2 ** Math.ceil(Math.log2(Math.max(4, ...this.steps.map((step) => step[DECODE]))));
		const [prefillColour, decodeColour] = [this.colour("prefill"), this.colour("decode")];
		const tall = (tokens, pixels) => tokens && Math.max(1, Math.round(pixels * tokens)); // what is not nothing is seen
		const up = (tokens) => tall(tokens, (floor - top) / budget);
		const mark = (y, words, colour) => {
			this.fill(this.colour(colour), left, y, width, unit);
			Object.assign(pen, { fillStyle: this.colour("muted"), textAlign: "right" });
			pen.fillText(words, left - 4 * unit, y + 4 * unit);
		};
		mark(floor, "0", "line");
		mark(roof, count(most), "line");
		mark(bottom, "0", "line");
		this.steps.forEach((step, index) => {
			const [x, wide] = this.column(index);
			const [prefill, decode, below] = [up(step[PREFILL]), up(step[DECODE]), tall(step[DECODE], (bottom - roof) / most)];
			pen.globalAlpha = step[DURATION] == null ? 0.5 : 1; // under way, or lost with its worker
			this.fill(prefillColour, x, floor - decode - prefill, wide, prefill);
			this.fill(decodeColour, x, floor - decode, wide, decode);
			this.fill(decodeColour, x, bottom - below, wide, below);
			pen.globalAlpha = 1;
			if (step[ID] === this.key) pen.strokeRect(x - unit, top, wide + 2 * unit, bottom - top);
		});
		mark(top, count(budget), "warn"); // above whatever fills it
	}

	// Where a step's column begins and how wide it is, in device pixels.
	column(index) {
		const left = GUTTER * this.unit;
		const edge = (at) => Math.round(left + ((at + COLUMNS - this.steps.length) * (this.canvas.width - left)) / COLUMNS);
		const wide = edge(index + 1) - edge(index);
		return [edge(index), wide > 3 ? wide - 1 : wide];
	}

	at(x) {
		const index = this.steps.findIndex((_, place) => x < this.column(place + 1)[0]);
		return this.steps[index]?.[ID] ?? null;
	}

	move(key, across) {
		const index = this.steps.findIndex((step) => step[ID] === key);
		return (this.steps[index + across] ?? this.steps.at(index))?.[ID] ?? null;
	}

	words(key) {
		const step = this.steps.find((candidate) => candidate[ID] === key) ?? this.steps.at(-1);
		if (!step) return "No step yet.";
		const [id, prefill, decode, sequences] = [ID, PREFILL, DECODE, SEQUENCES].map((field) => count(step[field]));
		const took = step[DURATION] == null ? "under way" : seconds(step[DURATION]);
		return `Step ${id}: ${prefill} prefill + ${decode} decode tokens, ${sequences} sequences, ${took}`;
	}
}
