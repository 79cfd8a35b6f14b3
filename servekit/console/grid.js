// The KV blocks, and whose they are. A cell is one of them, or several.

import { hue, Picture } from "./draw.js";
import { count, tell } from "./elements.js";

const STATES = { [-1]: "free", [-2]: "cached", [-3]: "shared", [-4]: "fenced" }; // as in live_view.py; else a sequence's
const TALLEST = 264; // pixels of CSS

export class Grid extends Picture {
	cells = [];

	constructor(live) {
		super(live, "KV blocks", { owned: "", shared: "", cached: "", fenced: "", free: "" });
	}

	show({ limits, blocks_per_cell: each = 1, cells: runs = [] }) {
		this.numBlocks = limits?.num_blocks ?? 0;
		this.each = each;
		this.cells = runs.flatMap(([what, length]) => new Array(length).fill(what));
		const size = each > 1 ? `a cell is ${count(each)} of them` : `of ${limits?.block_size ?? 0} tokens`;
		tell(this.about, `${count(this.numBlocks)}, ${size}`);
		const tally = { owned: 0, shared: 0, cached: 0, fenced: 0, free: 0 };
		for (const [what, length] of runs) tally[STATES[what] ?? "owned"] += length;
		const told = Object.entries(tally).map(([name, number]) => `${name} ${count(number)}${each > 1 ? " cells" : ""}`);
		told.forEach((words, index) => tell(this.legend.children[index], words));
		tell(this.line, this.words(this.key));
		this.canvas.ariaLabel = `Blocks: ${told.join(", ")}.`;
		this.fit();
		this.draw(this.live.selected);
	}

	// The largest cells with which all of it is not too tall.
	fit() {
		const wide = this.canvas.clientWidth;
		const tall = () => Math.ceil(this.cells.length / Math.floor(wide / this.size)) * this.size;
		for (this.size = 16; this.size > 3 && tall() > TALLEST; ) this.size -= 1;
		this.columns = Math.floor(wide / this.size);
		this.canvas.style.setProperty("height", `${tall()}px`);
	}

	draw(selected) {
		const { pen } = this.begin();
		const colours = {};
		const outline = (colour, x, y, side) => {
			pen.strokeStyle = colour;
			pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
		};
		this.cells.forEach((what, index) => {
			const [x, y, side] = this.square(index);
			const colour = (colours[what] ??= this.owner(what));
			pen.globalAlpha = selected === null || what === selected ? 1 : 0.3;
			if (STATES[what] === "fenced") return outline(colour, x, y, side);
			this.fill(colour, x, y, side, side);
			if (STATES[what] !== "shared") return;
			pen.beginPath(); // a diagonal: its colour alone would not do for everybody
			pen.moveTo(x, y + side);
			pen.lineTo(x + side, y);
			pen.strokeStyle = colours.panel ??= this.colour("panel");
			pen.stroke();
		});
		pen.globalAlpha = 1;
		if (this.key !== null) outline(this.colour("ink"), ...this.square(this.key));
	}

	owner(what) {
		return STATES[what] ? this.colour(STATES[what]) : `hsl(${hue(what)} 62% ${this.colour("owner-l")})`;
	}

	// Where a cell is and how wide, in device pixels.
	square(index) {
		const pitch = this.size * this.unit;
		const [x, y] = [index % this.columns, Math.floor(index / this.columns)].map((place) => Math.round(place * pitch));
		return [x, y, Math.round(pitch - (this.size > 4) * this.unit)];
	}

	at(x, y) {
		const [column, row] = [x, y].map((place) => Math.floor(place / (this.size * this.unit)));
		const index = row * this.columns + column;
		return column < this.columns && index < this.cells.length ? index : null;
	}

	move(key, across, down) {
		const to = key === null ? 0 : key + across + down * this.columns;
		return to in this.cells ? to : key;
	}

	press(key) {
		if (this.cells[key] >= 0) this.live.select(this.cells[key]);
	}

	words(key) {
		const what = this.cells[key];
		if (what === undefined) return "Point at a cell, or come here and use the arrow keys.";
		const first = key * this.each;
		const last = Math.min(first + this.each, this.numBlocks) - 1;
		return `Block ${count(first)}${last > first ? ` to ${count(last)}` : ""}: ${STATES[what] ?? `of sequence ${what}`}`;
	}
}
