// Draws frames (servekit/live_view.py), no more often than the screen does.

import { Bars } from "./bars.js";
import { attempt, make, tell } from "./elements.js";
import { Grid } from "./grid.js";
import { Life, Lives } from "./life.js";
import { Strip } from "./strip.js";
import { Tiles } from "./tiles.js";

const MOST_REQUESTS = 64;
const PARTS = { tiles: Tiles, bars: Bars, strip: Strip, grid: Grid, life: Life };

export class Live {
	lives = new Lives();
	selected = null; // whose life is open
	requests = new Set(); // this page's own
	parts = {}; // those that could be made

	constructor(root) {
		this.root = root;
		root.classList.add("live");
		this.note = make("p", { role: "status" }, "Waiting for the first frame.");
		for (const [name, Part] of Object.entries(PARTS)) attempt(name, () => (this.parts[name] = new Part(this)));
		const [tiles, bars, strip, grid, life] = Object.keys(PARTS).map((name) => this.parts[name]?.node ?? "");
		root.append(this.note, tiles, bars, make("div", {}, strip, grid), life);
		matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
	}

	show(state) {
		// Another server counts its sequences from 0.
		if (state.now_s < this.state?.now_s) Object.assign(this, { lives: new Lives(), selected: null });
		Object.assign(this, { state, lostWords: "", shownAt: new Date().toLocaleTimeString() });
		attempt("lives", () => this.lives.note(state, this.selected));
		this.redraw();
	}

	// The feed is gone. What is seen stays, greyed.
	lost(words) {
		this.lostWords = this.state ? `${words} The last frame came at ${this.shownAt}.` : words;
		this.redraw();
	}

	// A request of this page's: its sequences are marked.
	mine(requestId) {
		this.requests.add(requestId);
		const [oldest] = this.requests;
		if (this.requests.size > MOST_REQUESTS) this.requests.delete(oldest);
	}

	// Opens a sequence's life; null closes it, and the focus goes back.
	select(sequence_id) {
		const before = this.selected;
		this.selected = this.lives.has(sequence_id) ? sequence_id : null;
		if (this.selected === null) this.parts.bars?.focus(before); // an ended one's row goes when nobody looks at it
		this.draw();
		if (this.selected !== null) this.parts.life?.title.focus();
	}

	redraw() {
		this.asked ??= requestAnimationFrame(() => this.draw());
	}

	// Something fades, though no frame may come.
	wake(time_ms) {
		clearTimeout(this.timer);
		this.timer = setTimeout(() => this.redraw(), time_ms);
	}

	draw() {
		const { state, lostWords } = this;
		this.asked = null;
		this.root.classList.toggle("lost", Boolean(lostWords));
		if (lostWords || state) tell(this.note, lostWords || words(state));
		if (!state) return;
		for (const [name, part] of Object.entries(this.parts)) attempt(name, () => part.show(state));
	}
}

function words(state) {
	if (state.state !== "ready") return `The server is ${state.state}: ${state.stage}`;
	return state.num_running || state.num_waiting ? "" : "Nothing runs. Ask something, and watch it here.";
}
