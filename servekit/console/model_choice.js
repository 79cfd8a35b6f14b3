// Shows which model the page is about. On a server with several models it is a list to choose from.

import { byId, createElement, setText } from "./dom.js";

export class ModelChoice {
	#list = byId("model-choice");
	#text = ""; // of all options, to change them only when they differ

	// `onChoice(name)` is called when the user chooses a model.
	constructor(onChoice) {
		this.#list.addEventListener("change", () => onChoice(this.#list.value));
	}

	showFrame(state) {
		const models = state.models ?? [];
		setText(byId("model"), state.model_name);
		byId("model").hidden = models.length > 0;
		this.#list.hidden = models.length === 0;
		const labels = models.map(({ name, state, kind }) => (kind === "generate" ? `${name}: ${state}` : `${name} (${kind}): ${state}`));
		if (labels.join("\n") === this.#text) return;
		this.#text = labels.join("\n");
		this.#list.replaceChildren(
			...models.map(({ name }, index) => createElement("option", { value: name, textContent: labels[index] })),
		);
		this.#list.value = state.model_name;
	}
}
