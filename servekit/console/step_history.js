// The steps that the frames have reported since the page was opened. A frame holds the last 200.

export const MAX_STEPS = 20_000; // some 3 MB; at 20 ms a step it is 7 minutes

// The fields of a LiveStep, which comes as an array.
export const STEP_ID = 0;
export const NUM_PREFILL_TOKENS = 2;
export const NUM_DECODE_TOKENS = 3;
export const NUM_SEQUENCES = 4;
export const DURATION_S = 5;

export class StepHistory {
	steps = []; // ascending by step id; ids are missing where the page had no connection, or missed frames

	addFrame({ steps = [] }) {
		if (!steps.length) return;
		// The frame's steps replace their earlier reports: the duration of a step is known only when it has ended.
		let numKept = this.steps.length;
		while (numKept > 0 && this.steps[numKept - 1][STEP_ID] >= steps[0][STEP_ID]) numKept -= 1;
		this.steps.length = numKept;
		this.steps.push(...steps);
		if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
	}

	// The steps in groups of `groupSize` consecutive ids, by group number: id / groupSize, rounded down. Groups by id stay
	// the same while new steps come. Only the last `numGroups` group numbers are there, and those without a step are not.
	groups(groupSize, numGroups) {
		const groups = new Map();
		const lastGroup = this.lastGroup(groupSize);
		for (let index = this.steps.length - 1; index >= 0; index -= 1) {
			const step = this.steps[index];
			const number = Math.floor(step[STEP_ID] / groupSize);
			if (number <= lastGroup - numGroups) break;
			const group = groups.get(number);
			if (group) {
				group.firstId = step[STEP_ID];
				group.maxDecodeTokens = Math.max(group.maxDecodeTokens, step[NUM_DECODE_TOKENS]);
				if (numTokens(step) > numTokens(group.largest)) group.largest = step;
			} else {
				const stepId = step[STEP_ID];
				groups.set(number, { firstId: stepId, lastId: stepId, largest: step, maxDecodeTokens: step[NUM_DECODE_TOKENS] });
			}
		}
		return groups;
	}

	// The number of the newest step's group; -1 before the first step.
	lastGroup(groupSize) {
		return this.steps.length ? Math.floor(this.steps.at(-1)[STEP_ID] / groupSize) : -1;
	}
}

export function numTokens(step) {
	return step[NUM_PREFILL_TOKENS] + step[NUM_DECODE_TOKENS];
}
