// The scheduler view: draws the frames of the live feed, at most once for each picture that the screen shows.

import { createElement, runGuarded, setText } from "./dom.js";
import { formatSeconds } from "./format.js";
import { KvBlockGrid } from "./kv_block_grid.js";
import { generatesText, MetricTiles } from "./metric_tiles.js";
import { SequenceDetails } from "./sequence_details.js";
import { SequenceHistory } from "./sequence_history.js";
import { SequenceList } from "./sequence_list.js";
import { StepChart } from "./step_chart.js";
import { StepHistory } from "./step_history.js";

const MAX_OWN_REQUESTS = 64;
const PARTS = { tiles: MetricTiles, sequences: SequenceList, steps: StepChart, blocks: KvBlockGrid, details: SequenceDetails };

export class SchedulerView {
	frame = null; // the newest frame, a LiveState
	history = new SequenceHistory();
	stepHistory = new StepHistory();
	selectedId = null; // the sequence whose details are open
	ownRequestIds = new Set(); // requests that this page sent
	parts = {}; // by name; a part whose constructor throws is missing, and the others still work

	#disconnectedReason = "";
	#frameAtMs = 0; // when the newest frame came
	#animationFrame = 0;
	#redrawTimer = 0;

	// `headers` returns the headers of requests to the server.
	constructor(root, headers = () => ({})) {
		this.root = root;
		this.headers = headers;
		root.classList.add("scheduler-view");
		this.status = createElement("p", { role: "status", className: "status" }, "Waiting for the first frame.");
		this.frameAge = createElement("p", { className: "frame-age" }); // outside of the status: it changes each second
		for (const [name, Part] of Object.entries(PARTS)) {
			runGuarded(name, () => {
				this.parts[name] = new Part(this);
			});
		}
		const nodeOf = (name) => this.parts[name]?.node ?? "";
		this.charts = createElement("div", { className: "charts" }, nodeOf("steps"), nodeOf("blocks"));
		// The list of sequences is last, because its height changes: in one column nothing below it would stay in its place.
		root.append(this.status, this.frameAge, nodeOf("tiles"), this.charts, nodeOf("sequences"), nodeOf("details"));
		matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
	}

	showFrame(frame) {
		// The clock of a server that was started again begins anew, and so do its sequence ids. Another model has its own.
		if (frame.now_s < this.frame?.now_s || (this.frame && frame.model_name !== this.frame.model_name)) {
			this.history = new SequenceHistory();
			this.stepHistory = new StepHistory();
			this.selectedId = null;
		}
		this.frame = frame;
		this.#frameAtMs = performance.now();
		this.#disconnectedReason = "";
		// Not every frame is drawn, and each is recorded.
		runGuarded("sequence history", () => this.history.addFrame(frame, this.selectedId));
		runGuarded("step history", () => this.stepHistory.addFrame(frame));
		this.redraw();
	}

	// The last frame stays on the page, greyed out.
	showDisconnected(reason) {
		this.#disconnectedReason = reason;
		this.redraw();
	}

	addOwnRequest(requestId) {
		this.ownRequestIds.add(requestId);
		const [oldest] = this.ownRequestIds;
		if (this.ownRequestIds.size > MAX_OWN_REQUESTS) this.ownRequestIds.delete(oldest);
	}

	// Opens the details of a sequence. null closes them and gives the focus back to the sequence's row.
	select(sequenceId) {
		const previousId = this.selectedId;
		this.selectedId = this.history.has(sequenceId) ? sequenceId : null;
		// The focus comes before the drawing: the row of an ended sequence is removed unless it has the focus.
		if (this.selectedId === null) this.parts.sequences?.focusRow(previousId);
		this.draw();
		if (this.selectedId !== null) this.parts.details?.title.focus();
	}

	// Draws with the next picture of the screen.
	redraw() {
		this.#animationFrame ||= requestAnimationFrame(() => this.draw());
	}

	// Draws after a time even if no frame comes: for what changes by time alone.
	redrawAfter(timeMs) {
		clearTimeout(this.#redrawTimer);
		this.#redrawTimer = setTimeout(() => this.redraw(), timeMs);
	}

	draw() {
		cancelAnimationFrame(this.#animationFrame);
		this.#animationFrame = 0;
		this.#drawStatus();
		if (!this.frame) return;
		// Models that embed, rerank or classify have neither steps nor sequences nor KV blocks.
		this.charts.hidden = !generatesText(this.frame);
		if (this.parts.sequences) this.parts.sequences.node.hidden = !generatesText(this.frame);
		for (const [name, part] of Object.entries(this.parts)) runGuarded(name, () => part.show(this.frame));
	}

	#drawStatus() {
		const isDisconnected = this.#disconnectedReason !== "";
		this.root.classList.toggle("disconnected", isDisconnected);
		if (isDisconnected) setText(this.status, this.#disconnectedReason);
		else if (this.frame) setText(this.status, describeState(this.frame));
		const ageS = (performance.now() - this.#frameAtMs) / 1000;
		setText(this.frameAge, isDisconnected && this.frame ? `The last frame came ${formatSeconds(ageS)} ago.` : "");
		if (isDisconnected && this.frame) this.redrawAfter(1000); // the age is counted on
	}
}

function describeState({ state, stage, kind, num_running: numRunning, num_waiting: numWaiting }) {
	if (state !== "ready") return `The server is ${state}: ${stage}`;
	if (!generatesText({ kind })) return numWaiting ? "Inputs wait." : "No input waits.";
	return numRunning || numWaiting ? "Requests are running." : "Idle. Send a request to see it here.";
}
