// The KV blocks as a grid of cells in the colour of their sequence. A cell is one block, or several in a large pool.

import { Chart, sequenceHue } from "./chart.js";
import { setText } from "./dom.js";
import { formatCount } from "./format.js";

// What a cell is when it does not belong to one sequence, as in the server's live view. Other cells are sequence ids.
const STATES = { [-1]: "free", [-2]: "cached", [-3]: "shared", [-4]: "fenced" };
const MAX_HEIGHT = 264; // in CSS pixels, like the cell sizes
const MAX_CELL_SIZE = 16;
const MIN_CELL_SIZE = 3;

export class KvBlockGrid extends Chart {
	cells = []; // of each cell: a state or a sequence id; its index is this chart's key
	numBlocks = 0;
	blocksPerCell = 1;
	cellSize = MAX_CELL_SIZE;
	columns = 1;

	constructor(view) {
		super(view, "KV blocks", { owned: "", shared: "", cached: "", fenced: "", free: "" });
	}

	show({ limits, blocks_per_cell: blocksPerCell = 1, cells: runs = [] }) {
		this.numBlocks = limits?.num_blocks ?? 0;
		this.blocksPerCell = blocksPerCell;
		this.cells = runs.flatMap(([owner, length]) => new Array(length).fill(owner));
		const isGrouped = blocksPerCell > 1;
		const unit = isGrouped ? `${formatCount(blocksPerCell)} to a cell` : `of ${limits?.block_size ?? 0} tokens`;
		setText(this.subtitle, `${formatCount(this.numBlocks)}, ${unit}`);
		const counts = { owned: 0, shared: 0, cached: 0, fenced: 0, free: 0 };
		for (const [owner, length] of runs) counts[STATES[owner] ?? "owned"] += length;
		const entries = Object.entries(counts).map(
			([name, number]) => `${name} ${formatCount(number)}${isGrouped ? " cells" : ""}`,
		);
		entries.forEach((text, index) => setText(this.legend.children[index], text));
		setText(this.readout, this.describe(this.key));
		this.setLabel(`Blocks: ${entries.join(", ")}.`);
		this.#chooseCellSize();
		this.#draw(this.view.selectedId);
	}

	// The largest cells with which the grid is not too high.
	#chooseCellSize() {
		const width = this.canvas.clientWidth;
		const heightOf = (size) => Math.ceil(this.cells.length / Math.floor(width / size)) * size;
		let size = MAX_CELL_SIZE;
		while (size > MIN_CELL_SIZE && heightOf(size) > MAX_HEIGHT) size -= 1;
		this.cellSize = size;
		this.columns = Math.floor(width / size);
		this.canvas.style.setProperty("height", `${heightOf(size)}px`);
	}

	#draw(selectedId) {
		this.beginDrawing();
		const { pen } = this;
		const colours = new Map(); // each is read from the style sheet once: that is slow, and there are 4,096 cells
		const diagonalColour = this.cssColour("panel");
		for (const [index, owner] of this.cells.entries()) {
			const [x, y, side] = this.squareOf(index);
			if (!colours.has(owner)) colours.set(owner, this.colourOf(owner));
			const colour = colours.get(owner);
			pen.globalAlpha = selectedId === null || owner === selectedId ? 1 : 0.3;
			if (STATES[owner] === "fenced") {
				this.#strokeSquare(colour, x, y, side);
				continue;
			}
			this.fillRect(colour, x, y, side, side);
			if (STATES[owner] === "shared") this.#drawDiagonal(diagonalColour, x, y, side);
		}
		pen.globalAlpha = 1;
		if (this.key !== null) this.#strokeSquare(this.cssColour("ink"), ...this.squareOf(this.key));
	}

	#strokeSquare(colour, x, y, side) {
		this.pen.strokeStyle = colour;
		this.pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
	}

	// Marks a shared cell for readers who cannot tell its colour from a sequence's.
	#drawDiagonal(colour, x, y, side) {
		const { pen } = this;
		pen.beginPath();
		pen.moveTo(x, y + side);
		pen.lineTo(x + side, y);
		pen.strokeStyle = colour;
		pen.stroke();
	}

	colourOf(owner) {
		if (STATES[owner]) return this.cssColour(STATES[owner]);
		return `hsl(${sequenceHue(owner)} 62% ${this.cssColour("owner-l")})`;
	}

	// Where a cell is and how wide it is, in device pixels. There is a gap between cells that are large enough.
	squareOf(index) {
		const pitch = this.cellSize * this.pixelRatio;
		const x = Math.round((index % this.columns) * pitch);
		const y = Math.round(Math.floor(index / this.columns) * pitch);
		const gap = this.cellSize > 4 ? this.pixelRatio : 0;
		return [x, y, Math.round(pitch - gap)];
	}

	keyAt(x, y) {
		const pitch = this.cellSize * this.pixelRatio;
		const column = Math.floor(x / pitch);
		const index = Math.floor(y / pitch) * this.columns + column;
		return column < this.columns && index < this.cells.length ? index : null;
	}

	moveKey(key, dx, dy) {
		const target = key === null ? 0 : key + dx + dy * this.columns;
		return target in this.cells ? target : key;
	}

	activate(key) {
		if (this.cells[key] >= 0) this.view.select(this.cells[key]);
	}

	describe(key) {
		const owner = this.cells[key];
		if (owner === undefined) return "Point at a cell, or focus this line and use the arrow keys.";
		const first = key * this.blocksPerCell;
		const last = Math.min(first + this.blocksPerCell, this.numBlocks) - 1;
		const blocks = last > first ? `Blocks ${formatCount(first)} to ${formatCount(last)}` : `Block ${formatCount(first)}`;
		return `${blocks}: ${STATES[owner] ?? `sequence ${owner}`}`;
	}
}
