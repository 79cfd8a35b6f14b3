// A window on the scheduler: draws the frames that it is given (servekit/live_view.py), no more often than the screen does.
// Whoever makes it owns the connection.

import { Bars } from "./bars.js";
import { make, seconds, tell } from "./elements.js";
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
	parts = {};

	constructor(root) {
		this.root = root;
		root.classList.add("live");
		this.note = make("p", { role: "status" }, "Waiting for the first frame."); // words that seldom change
		this.age = make("p");
		this.trouble = make("p", { role: "status", className: "bad" });
		const part = ([name, Part]) => this.attempt(name, () => (this.parts[name] = new Part(this)).node) ?? "";
		const [tiles, bars, strip, grid, life] = Object.entries(PARTS).map(part);
		root.append(this.note, this.age, this.trouble, tiles, bars, make("div", {}, strip, grid), life);
		matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
	}

	// Every frame, whole.
	show(state) {
		// Another server counts its sequences from 0.
		if (state.now_s < this.state?.now_s) Object.assign(this, { lives: new Lives(), selected: null });
		Object.assign(this, { state, shownAt: performance.now(), lostWords: "" });
		this.attempt("lives", () => this.lives.note(state, this.selected));
		this.redraw();
	}

	// The feed is gone. What is seen stays, greyed.
	lost(words) {
		this.lostWords = words;
		this.redraw();
	}

	// A request of this page: its sequences are marked.
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
		if (lostWords) this.wake(1000);
		const age = seconds((performance.now() - this.shownAt) / 1000);
		tell(this.age, lostWords && state ? `The last frame came ${age} ago.` : "");
		if (lostWords || state) tell(this.note, lostWords || words(state));
		if (!state) return;
		for (const [name, part] of Object.entries(this.parts)) this.attempt(name, () => part.show(state));
	}

	// A part that throws does not stop the others, and is told once.
	attempt(name, action) {
		try {
			return action();
		} catch (error) {
			if (this.trouble.textContent) return;
			console.error(error);
			tell(this.trouble, `The ${name} cannot be drawn: ${error.message}`);
		}
	}
}

function words(state) {
	if (state.state !== "ready") return `The server is ${state.state}: ${state.stage}`;
	return state.num_running || state.num_waiting ? "" : "Nothing runs. Ask something, and watch it here.";
}
