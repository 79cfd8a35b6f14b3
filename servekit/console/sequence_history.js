// What the frames have reported about each sequence since the page was opened. A frame holds only the present.

const MAX_SEQUENCES = 256;
const SPEED_WINDOW_S = 2; // tokens per second are measured over this time
const BRIEF_AGE_S = 1; // a sequence seen only among the ended ones is shown if it ended within this time
// A frame leaves out fields that have their default. Without these, a value that falls to 0 would keep its last value.
const OMITTED_FIELDS = {
	num_cached_tokens: 0,
	num_preemptions: 0,
	num_blocks: 0,
	num_drafted_tokens: 0,
	num_accepted_tokens: 0,
};

// By sequence id, a record: the fields of the newest LiveSequence, and
//   samples      [time in s, output tokens] within the last SPEED_WINDOW_S
//   preemptions  [time in s, computed tokens that were lost] of each preemption
//   preemptedAtMs  the page's time of the newest preemption
//   lastSeenS    the server's time of the newest frame with the sequence
//   end          its LiveEnd, once it has ended
export class SequenceHistory extends Map {
	unseenIds = new Set(); // sequences that began and ended between two frames, until they have a row

	addFrame({ now_s, sequences = [], ended = [] }, selectedId) {
		for (const sequence of sequences) this.#addSequence(sequence, now_s);
		for (const end of ended) this.#addEnd(end, now_s);
		this.#forgetOldest(now_s, selectedId);
	}

	#addSequence(sequence, nowS) {
		const record = this.get(sequence.sequence_id) ?? { samples: [], preemptions: [] };
		if (sequence.num_preemptions > record.num_preemptions) {
			record.preemptions.push([nowS, record.num_computed_tokens]);
			record.preemptedAtMs = performance.now();
		}
		const samples = record.samples.filter(([timeS]) => timeS > nowS - SPEED_WINDOW_S);
		samples.push([nowS, sequence.num_output_tokens]);
		Object.assign(record, OMITTED_FIELDS, sequence, { samples, lastSeenS: nowS });
		this.set(sequence.sequence_id, record);
	}

	#addEnd(end, nowS) {
		let record = this.get(end.sequence_id);
		if (!record && nowS - end.ended_s < BRIEF_AGE_S) {
			record = {
				...OMITTED_FIELDS,
				...end,
				num_computed_tokens: end.num_prompt_tokens + end.num_output_tokens,
				samples: [[0, 0]],
				preemptions: [],
				lastSeenS: nowS,
			};
			this.set(end.sequence_id, record);
			this.unseenIds.add(end.sequence_id);
		}
		if (record) Object.assign(record, { end, num_output_tokens: end.num_output_tokens });
	}

	// Bounds the memory of a page that is open for days. Sequences of the newest frame and the selected one stay.
	#forgetOldest(nowS, selectedId) {
		for (const [sequenceId, { lastSeenS }] of this) {
			if (this.size <= MAX_SEQUENCES) return;
			if (lastSeenS < nowS && sequenceId !== selectedId) this.delete(sequenceId);
		}
	}
}
