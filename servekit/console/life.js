// A sequence's life so far: what frames have told of it since the page was opened.

import { hue } from "./draw.js";
import { count, make, seconds, tell } from "./elements.js";

const MOST_REMEMBERED = 256;
const SPEED_OF_S = 2; // tokens per second are of so long
const OMITTED = { num_cached_tokens: 0, num_preemptions: 0, num_blocks: 0 }; // by frames, where they are 0

// By sequence_id: what the last frame told of it, [time, output tokens] of late, its losses, and its end.
export class Lives extends Map {
	note({ now_s, sequences = [], ended = [] }, selected) {
		for (const one of sequences) {
			const life = this.get(one.sequence_id) ?? { late: [], losses: [] };
			if (one.num_preemptions > life.num_preemptions) {
				life.losses.push([now_s, life.num_computed_tokens]);
				life.preemptedAt = performance.now();
			}
			const late = life.late.filter(([at_s]) => at_s > now_s - SPEED_OF_S);
			late.push([now_s, one.num_output_tokens]);
			this.set(one.sequence_id, Object.assign(life, OMITTED, one, { late, seen_s: now_s }));
		}
		for (const end of ended) {
			let life = this.get(end.sequence_id);
			if (!life && now_s - end.ended_s < 1) {
				// It came and went between two frames.
				const num_computed_tokens = end.num_prompt_tokens + end.num_output_tokens;
				life = { ...OMITTED, ...end, late: [[0, 0]], losses: [], num_computed_tokens, seen_s: now_s, isBrief: true };
				this.set(end.sequence_id, life);
			}
			if (life) Object.assign(life, { end, num_output_tokens: end.num_output_tokens });
		}
		for (const [id, { seen_s }] of this) {
			if (this.size > MOST_REMEMBERED && seen_s < now_s && id !== selected) this.delete(id);
		}
	}
}

export class Life {
	constructor(live) {
		this.live = live;
		this.title = make("h3", { tabIndex: -1 });
		this.facts = make("p");
		const close = make("button", { type: "button", ariaLabel: "Close", onclick: () => live.select(null) }, "×");
		this.node = make("section", { className: "life", role: "dialog", hidden: true }, this.title, close, this.facts);
		this.node.onkeydown = (event) => {
			if (event.key !== "Escape") return;
			event.stopPropagation(); // beyond this panel it stops what Play streams
			live.select(null);
		};
	}

	show({ now_s }) {
		const { lives, selected } = this.live;
		const life = lives.get(selected);
		this.node.hidden = !life;
		if (!life) return;
		tell(this.title, `Sequence ${selected}: ${life.end?.finish_reason ?? life.state}`);
		this.node.ariaLabel = `Sequence ${selected}`;
		this.title.style.setProperty("--hue", hue(selected));
		tell(this.facts, factsOf(life, now_s).join("\n"));
	}
}

function factsOf(life, now_s) {
	const { end, late, num_prompt_tokens: prompt } = life;
	const since = (time_s) => seconds(time_s - life.arrival_s);
	const [[then_s, before], [last_s, output]] = [late[0], late.at(-1)];
	const speed = last_s > then_s && !end ? ((output - before) / (last_s - then_s)).toFixed(1) : "–";
	return [
		`arrived ${since(now_s)} ago`,
		`waited ${since(life.first_scheduled_s ?? end?.ended_s ?? now_s)}`,
		life.first_token_s == null ? "no token yet" : `first token after ${since(life.first_token_s)}`,
		`now ${speed} tokens/s`,
		`prompt of ${count(prompt)} tokens, ${count(life.num_cached_tokens)} in the cache`,
		`prefilled ${count(Math.min(life.num_computed_tokens, prompt))}`,
		`generated ${count(life.num_output_tokens)} of at most ${count(life.max_tokens)}`,
		end ? "blocks given back" : `blocks ${count(life.num_blocks)}`,
		`preemptions ${count(life.num_preemptions)}`,
		...life.losses.map(([at_s, lost]) => `after ${since(at_s)} preempted: ${count(lost)} to compute again`),
		end ? `ended after ${since(end.ended_s)}: ${end.finish_reason}` : "not ended",
	];
}
