// The page: its key, its connection to the feed of the scheduler, and who is told what of it.

import { $, attempt, tell } from "./elements.js";
import { Play, reasonOf } from "./play.js";
import { eventsOf } from "./sse.js";

const FIRST_PAUSE_MS = 1_000;
const LONGEST_PAUSE_MS = 10_000;
const SILENCE_MS = 30_000; // frames come each second at least; after a laptop's sleep a connection says nothing

// What the parts share. The key is kept here alone, so a reload forgets it.
const page = {
	key: "",
	modelName: "",
	headers() {
		return this.key ? { Authorization: `Bearer ${this.key}` } : {};
	},
	// Somebody was answered 401. Returns why, in words.
	wantKey() {
		$("key-form").hidden = false;
		return this.key ? "The server does not know this API key." : "The server wants an API key: it goes to the top of the page.";
	},
	mine(requestId) {
		toLive((live) => live.mine(requestId));
	},
};

$("key-form").addEventListener("submit", (event) => {
	event.preventDefault();
	page.key = $("key").value;
	$("key").value = ""; // nothing for a browser to keep
	$("key-form").hidden = true;
	$("text").focus();
	wake();
});

let live = null;

const toLive = (use) => attempt("live view", () => live && use(live));

let isLocked = false; // until there is a key
let connection = null; // an AbortController
let wake = () => {}; // ends the pause before a connection
let timer = 0; // does so too; and ends a connection that says nothing

function showState(words, colour) {
	tell($("server-state"), words);
	$("dot").className = colour;
}

function show(state) {
	const words = state.state === "ready" ? "ready" : `${state.state}: ${state.stage}`;
	showState(words, { ready: "good", failed: "bad" }[state.state] ?? "warn");
	page.modelName = $("model").textContent = state.model_name;
	toLive((live) => live.show(state));
}

// One connection, to its end. Returns why it ended, in words.
async function follow(signal, heard) {
	const response = await fetch("ui/events", { headers: page.headers(), signal, cache: "no-store" }).catch(() => null);
	if (!response) return "The server cannot be reached.";
	isLocked = response.status === 401;
	if (isLocked) return page.wantKey();
	if (!response.ok) return reasonOf(response);
	$("key-form").hidden = true;
	try {
		for await (const events of eventsOf(response)) {
			heard();
			const last = events.findLast((event) => event.type === "state"); // every frame is whole
			if (last) show(JSON.parse(last.data));
		}
	} catch {
		// aborted, or broken
	}
	return "The connection to the server broke.";
}

function later(action, timeMs) {
	clearTimeout(timer);
	timer = setTimeout(action, timeMs);
}

// While somebody looks.
async function keepFollowing() {
	for (let pauseMs = 0; ; pauseMs = Math.min(Math.max(FIRST_PAUSE_MS, 2 * pauseMs), LONGEST_PAUSE_MS)) {
		await new Promise((go) => {
			wake = go;
			if (!document.hidden && !isLocked) later(go, pauseMs);
		});
		connection = new AbortController();
		const end = () => connection.abort();
		later(end, SILENCE_MS);
		const words = await follow(connection.signal, () => {
			pauseMs = 0;
			later(end, SILENCE_MS);
		});
		clearTimeout(timer);
		if (document.hidden) continue;
		showState(words, "bad");
		toLive((live) => live.lost(words));
	}
}

document.addEventListener("visibilitychange", () => {
	if (!document.hidden) return wake();
	clearTimeout(timer);
	connection?.abort();
});

attempt("form", () => new Play(page));
await attempt("live view", async () => {
	const { Live } = await import("./live.js");
	live = new Live($("live-root"));
});
keepFollowing();
