// What the canvas charts of the scheduler view share.

import { createElement } from "./dom.js";

const MIN_LABEL_INTERVAL_MS = 2000;
const ARROW_KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

// The hue of a sequence's colour. By the golden angle, the hues of consecutive ids are far apart.
export const sequenceHue = (sequenceId) => (sequenceId * 137.508) % 360;

// `entries`: {CSS class: label}
export function createLegend(entries) {
	const items = Object.entries(entries).map(([className, label]) => createElement("li", { className }, label));
	return createElement("ul", { className: "legend" }, ...items);
}

// A canvas with a title, a legend, and a readout line below that describes the item under the pointer or at the keyboard
// cursor. The readout has the role of a slider: a screen reader announces a slider when its user moves it, and only then.
//
// A subclass implements, with keys that name items and may be null:
//   keyAt(x, y) -> key      the item at a place in device pixels
//   moveKey(key, dx, dy) -> key   the item that an arrow key leads to
//   describe(key) -> text   for the readout
//   activate(key)           on click or Enter; optional
export class Chart {
	key = null; // the item that is described
	subtitle = createElement("span");
	canvas = createElement("canvas", { role: "img" });
	pen = this.canvas.getContext("2d");
	pixelRatio = 1; // device pixels for each CSS pixel

	#labelledAtMs = -Infinity;

	constructor(view, title, legendEntries) {
		this.view = view;
		this.legend = createLegend(legendEntries);
		this.readout = createElement("p", {
			className: "readout",
			role: "slider",
			tabIndex: 0,
			ariaLabel: title,
			ariaValueNow: 0,
		});
		this.header = createElement("div", { className: "chart-header" }, createElement("h3", {}, `${title} `, this.subtitle));
		this.node = createElement("section", { className: "chart" }, this.header, this.legend, this.canvas, this.readout);
		new ResizeObserver(() => view.redraw()).observe(this.canvas);
		const keyUnder = (event) => this.keyAt(event.offsetX * this.pixelRatio, event.offsetY * this.pixelRatio);
		this.canvas.onpointermove = (event) => this.setKey(keyUnder(event));
		this.canvas.onpointerleave = () => this.setKey(null);
		this.canvas.onclick = (event) => this.activate(keyUnder(event));
		this.readout.onblur = () => this.setKey(null);
		this.readout.onkeydown = (event) => this.#onKeyDown(event);
	}

	setKey(key) {
		this.key = key;
		this.view.redraw();
	}

	activate() {}

	#onKeyDown(event) {
		if (event.key === "Enter") this.activate(this.key);
		const direction = ARROW_KEYS[event.key];
		if (!direction) return;
		event.preventDefault();
		this.setKey(this.moveKey(this.key, ...direction));
		this.readout.ariaValueNow = this.key ?? 0;
		this.readout.ariaValueText = this.describe(this.key);
	}

	// The text alternative of the picture. It changes seldom: a screen reader that gets ten texts a second reads none.
	setLabel(text) {
		if (performance.now() - this.#labelledAtMs < MIN_LABEL_INTERVAL_MS) return;
		this.#labelledAtMs = performance.now();
		this.canvas.ariaLabel = text;
	}

	// Clears the canvas and gives it the size in device pixels that it has on the page.
	beginDrawing() {
		const { canvas, pen } = this;
		this.pixelRatio = devicePixelRatio;
		canvas.width = Math.round(canvas.clientWidth * this.pixelRatio);
		canvas.height = Math.round(canvas.clientHeight * this.pixelRatio);
		pen.font = `${11 * this.pixelRatio}px system-ui`;
	}

	// The value of a colour of style.css, in the scheme that is on.
	cssColour(name) {
		return getComputedStyle(this.canvas).getPropertyValue(`--${name}`);
	}

	fillRect(colour, x, y, width, height) {
		this.pen.fillStyle = colour;
		this.pen.fillRect(x, y, width, height);
	}
}
