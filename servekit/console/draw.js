// What the pictures of Live share.

import { make } from "./elements.js";

export const hue = (id) => (id * 137.508) % 360; // of a sequence: neighbours are far apart on the wheel

// Colours and what they mean: {class: words}.
export function legend(colours) {
	const entries = Object.entries(colours).map(([className, words]) => make("li", { className }, words));
	return make("ul", { className: "legend" }, ...entries);
}

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

// A canvas with a line about what the pointer is over or the arrow keys have come to. The line is a slider: screen readers
// read one aloud when its owner moves it, and only then. Who extends this has at(x, y) -> key, words(key), press(key) and
// move(key, across, down) -> key; a key may be null.
export class Picture {
	key = null;
	about = make("span");
	canvas = make("canvas", { role: "img" });
	pen = this.canvas.getContext("2d");

	constructor(live, title, colours) {
		const { canvas } = this;
		const line = make("p", { className: "readout", role: "slider", tabIndex: 0, ariaLabel: title, ariaValueNow: 0 });
		Object.assign(this, { live, line, legend: legend(colours) });
		this.node = make("section", { className: title }, make("h3", {}, `${title} `, this.about), this.legend, canvas, line);
		new ResizeObserver(() => live.redraw()).observe(canvas);
		const at = (event) => this.at(event.offsetX * this.unit, event.offsetY * this.unit);
		canvas.onpointermove = (event) => this.pick(at(event));
		canvas.onpointerleave = line.onblur = () => this.pick(null);
		canvas.onclick = (event) => this.press(at(event));
		line.onkeydown = (event) => {
			if (event.key === "Enter") this.press(this.key);
			if (!MOVES[event.key]) return;
			event.preventDefault();
			this.pick(this.move(this.key, ...MOVES[event.key]));
			Object.assign(line, { ariaValueNow: this.key ?? 0, ariaValueText: this.words(this.key) });
		};
	}

	pick(key) {
		this.key = key;
		this.live.redraw();
	}

	press() {}

	// Clears and measures it: in device pixels, of which `unit` are one of CSS.
	begin() {
		const { canvas, pen } = this;
		const unit = (this.unit = devicePixelRatio);
		canvas.width = Math.round(canvas.clientWidth * unit);
		canvas.height = Math.round(canvas.clientHeight * unit);
		pen.font = `${11 * unit}px system-ui`;
		return { pen, unit, width: canvas.width, height: canvas.height };
	}

	colour(name) {
		return getComputedStyle(this.canvas).getPropertyValue(`--${name}`);
	}

	fill(colour, x, y, width, height) {
		this.pen.fillStyle = colour;
		this.pen.fillRect(x, y, width, height);
	}
}
