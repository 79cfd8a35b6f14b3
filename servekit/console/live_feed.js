// The connection to GET /ui/events: opens it, passes on its frames, and opens it again when it ends.

import { readEvents } from "./event_stream.js";
import { describeErrorResponse } from "./error_response.js";

const FIRST_RETRY_MS = 1_000;
const MAX_RETRY_MS = 10_000;
// The server sends a frame each second at least. After a laptop's sleep a dead connection stays open and silent.
const SILENCE_TIMEOUT_MS = 30_000;

// `callbacks`: headers() returns the request's headers; onFrame(state) gets each frame; onUnauthorized() is called for a
// 401 and returns the reason as text; onConnected() is called when the server accepts; onDisconnected(reason) at the end.
export class LiveFeed {
	#callbacks;
	#needsKey = false; // after a 401 there is no retry until the user enters a key
	#request = null; // AbortController of the open connection
	#model = ""; // whose frames are wanted; none: those of the server's default model
	#isSwitching = false; // the connection was ended to open one for another model
	#endPause = () => {}; // ends the pause before the next connection
	#timer = 0; // before a connection it ends the pause; during one it aborts a silent connection

	constructor(callbacks) {
		this.#callbacks = callbacks;
		// A tab that is not visible holds no connection: viewers cost the server time.
		document.addEventListener("visibilitychange", () => {
			if (document.hidden) this.#suspend();
			else this.connectNow();
		});
	}

	connectNow() {
		this.#endPause();
	}

	// Shows another model from now on.
	showModel(name) {
		this.#model = name;
		this.#isSwitching = true;
		this.#request?.abort();
		this.#endPause();
	}

	#suspend() {
		clearTimeout(this.#timer);
		this.#request?.abort();
	}

	// Runs as long as the page is open.
	async run() {
		let retryMs = 0;
		for (;;) {
			await this.#pause(retryMs);
			this.#request = new AbortController();
			const { reason, receivedAny } = await this.#readOneConnection();
			clearTimeout(this.#timer);
			if (this.#isSwitching) {
				this.#isSwitching = false;
				retryMs = 0;
				continue;
			}
			if (!document.hidden) this.#callbacks.onDisconnected(reason);
			retryMs = receivedAny ? FIRST_RETRY_MS : Math.min(Math.max(FIRST_RETRY_MS, 2 * retryMs), MAX_RETRY_MS);
		}
	}

	async #pause(timeMs) {
		await new Promise((resolve) => {
			this.#endPause = resolve;
			if (!document.hidden && !this.#needsKey) this.#startTimer(resolve, timeMs);
		});
	}

	#startTimer(action, timeMs) {
		clearTimeout(this.#timer);
		this.#timer = setTimeout(action, timeMs);
	}

	// Returns why the connection ended, as text, and whether anything came.
	async #readOneConnection() {
		const request = this.#request;
		const restartSilenceTimer = () => this.#startTimer(() => request.abort(), SILENCE_TIMEOUT_MS);
		let receivedAny = false;
		restartSilenceTimer();
		let response;
		try {
			const headers = this.#callbacks.headers();
			const path = this.#model ? `ui/events?model=${encodeURIComponent(this.#model)}` : "ui/events";
			response = await fetch(path, { headers, signal: request.signal, cache: "no-store" });
		} catch {
			return { reason: "The server cannot be reached.", receivedAny };
		}
		this.#needsKey = response.status === 401;
		if (this.#needsKey) return { reason: this.#callbacks.onUnauthorized(), receivedAny };
		if (!response.ok) return { reason: await describeErrorResponse(response), receivedAny };
		this.#callbacks.onConnected();
		try {
			for await (const events of readEvents(response)) {
				receivedAny = true;
				restartSilenceTimer();
				// Each frame holds the whole state, so only the newest one matters.
				const newest = events.findLast((event) => event.type === "state");
				if (newest) this.#callbacks.onFrame(JSON.parse(newest.data));
			}
		} catch {
			// The request was aborted, or the connection broke.
		}
		return { reason: "The connection to the server broke.", receivedAny };
	}
}
