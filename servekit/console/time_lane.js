// The picture of where a request's time went: a lane of intervals, each with one cause, and a line for each cause.

import { createElement, setText } from "./dom.js";
import { formatPercent, formatSeconds } from "./format.js";

const PERIOD_MS = 1000; // between two questions, while the request runs
const REQUEST_ID = /^[A-Za-z0-9._-]{1,64}$/; // as the server gives and takes them

export class TimeLane {
	#headers;
	#requestId = ""; // the one that is shown
	#askedAtMs = -Infinity;
	#isComplete = false;

	constructor(headers) {
		this.#headers = headers;
		this.lane = createElement("div", { className: "lane" });
		this.causes = createElement("ul", { className: "causes" });
		this.node = createElement("div", { className: "time-lane", hidden: true }, this.lane, this.causes);
	}

	// Shows the request of a sequence; asks the server again while it has not ended.
	show(requestId) {
		if (requestId !== this.#requestId) {
			this.#requestId = requestId;
			this.#askedAtMs = -Infinity;
			this.#isComplete = false;
			this.node.hidden = true;
		}
		const isDue = performance.now() - this.#askedAtMs >= PERIOD_MS;
		if (this.#isComplete || !isDue || !REQUEST_ID.test(requestId ?? "")) return;
		this.#askedAtMs = performance.now();
		this.#ask(requestId);
	}

	async #ask(requestId) {
		let explanation;
		try {
			const response = await fetch(`v1/requests/${requestId}/explain`, { headers: this.#headers(), cache: "no-store" });
			if (!response.ok) {
				this.#isComplete = true; // the server does not remember it
				return;
			}
			explanation = await response.json();
		} catch {
			return; // the feed says that the server cannot be reached
		}
		if (requestId !== this.#requestId) return; // another one is shown by now
		this.#isComplete = explanation.is_finished;
		this.#draw(explanation);
	}

	#draw({ wall_time_s: wallTimeS, causes, intervals }) {
		this.node.hidden = false;
		this.lane.replaceChildren(
			...intervals.map((interval) => {
				const title = describeInterval(interval);
				const part = createElement("span", { title, role: "img", ariaLabel: title });
				part.dataset.cause = interval.cause;
				part.style.width = `${(100 * (interval.end_s - interval.start_s)) / wallTimeS}%`;
				return part;
			}),
		);
		const longestFirst = Object.entries(causes).sort(([, one], [, other]) => other - one);
		this.causes.replaceChildren(
			...longestFirst.map(([cause, seconds]) => {
				const line = createElement("li");
				line.dataset.cause = cause;
				setText(line, `${cause.replaceAll("_", " ")} ${formatSeconds(seconds)}, ${formatPercent(seconds, wallTimeS)}`);
				return line;
			}),
		);
	}
}

function describeInterval({ cause, start_s, end_s, rule, behind_sequence_id: behind, steps, mean_other_sequences: others }) {
	return [
		`${cause.replaceAll("_", " ")}: ${formatSeconds(end_s - start_s)}, from ${formatSeconds(start_s)} on`,
		rule,
		behind === undefined ? "" : `behind sequence ${behind}`,
		steps ? `${steps} steps with ${others ?? 0} others` : "",
	]
		.filter(Boolean)
		.join(", ");
}
