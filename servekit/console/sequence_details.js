// The panel with the details of one sequence, from its arrival to its end.

import { sequenceHue } from "./chart.js";
import { createElement, setText } from "./dom.js";
import { formatCount, formatSeconds } from "./format.js";
import { TimeLane } from "./time_lane.js";

export class SequenceDetails {
	constructor(view) {
		this.view = view;
		this.title = createElement("h3", { tabIndex: -1 });
		this.timeLane = new TimeLane(view.headers);
		this.facts = createElement("p");
		const close = createElement("button", { type: "button", ariaLabel: "Close", onclick: () => view.select(null) }, "×");
		const properties = { className: "details", role: "dialog", hidden: true };
		this.node = createElement("section", properties, this.title, close, this.timeLane.node, this.facts);
		this.node.onkeydown = (event) => {
			if (event.key !== "Escape") return;
			event.stopPropagation(); // outside of this panel, Escape stops the playground's request
			view.select(null);
		};
	}

	show({ now_s }) {
		const { history, selectedId } = this.view;
		const record = history.get(selectedId);
		this.node.hidden = !record;
		if (!record) return;
		setText(this.title, `Sequence ${selectedId}: ${record.end?.finish_reason ?? record.state}`);
		this.node.ariaLabel = `Sequence ${selectedId}`;
		this.title.style.setProperty("--hue", sequenceHue(selectedId));
		this.timeLane.show(record.request_id);
		setText(this.facts, describeSequence(record, now_s).join("\n"));
	}
}

function describeSequence(record, nowS) {
	const { end, num_prompt_tokens: numPromptTokens } = record;
	const sinceArrival = (timeS) => formatSeconds(timeS - record.arrival_s);
	const waitEndS = record.first_scheduled_s ?? end?.ended_s ?? nowS;
	return [
		`arrived ${sinceArrival(nowS)} ago`,
		`waited ${sinceArrival(waitEndS)}`,
		record.first_token_s == null ? "no token yet" : `first token after ${sinceArrival(record.first_token_s)}`,
		`now ${currentSpeed(record)} tokens/s`,
		`prompt: ${formatCount(numPromptTokens)} tokens, ${formatCount(record.num_cached_tokens)} from the cache`,
		`prefilled ${formatCount(Math.min(record.num_computed_tokens, numPromptTokens))}`,
		`generated ${formatCount(record.num_output_tokens)} of at most ${formatCount(record.max_tokens)}`,
		...(record.num_drafted_tokens
			? [`drafts: ${formatCount(record.num_accepted_tokens)} of ${formatCount(record.num_drafted_tokens)} accepted`]
			: []),
		end ? "KV blocks released" : `KV blocks: ${formatCount(record.num_blocks)}`,
		`preemptions: ${formatCount(record.num_preemptions)}`,
		...record.preemptions.map(
			([timeS, numLost]) => `preempted after ${sinceArrival(timeS)}: ${formatCount(numLost)} tokens to recompute`,
		),
		end ? `ended after ${sinceArrival(end.ended_s)}: ${end.finish_reason}` : "not ended",
	];
}

function currentSpeed({ samples, end }) {
	const [firstS, numBefore] = samples[0];
	const [lastS, numAfter] = samples.at(-1);
	if (end || lastS <= firstS) return "–";
	return ((numAfter - numBefore) / (lastS - firstS)).toFixed(1);
}
