// The form for a model that embeds, reranks, classifies or computes tensors. It takes the playground's place while such
// a model is shown.

import { neutralize } from "./answer_list.js";
import { byId, createElement } from "./dom.js";
import { describeErrorResponse } from "./error_response.js";

const MAX_LABELS = 10; // of a classifier that are shown: it may have thousands
const MAX_NUMBERS = 20; // of a tensor

// By kind: the names of the fields, the request that they make, and what of its answer is shown, as [name, number] or
// [name, text].
const KINDS = {
	embed: {
		title: "Compare two texts",
		labels: ["First text", "Second text"],
		request: ({ first, second }) => ({ path: "v1/embeddings", body: { input: [first, second] } }),
		rows({ data }) {
			const [one, other] = data.map(({ embedding }) => embedding);
			return [["cosine similarity", cosine(one, other)], ["numbers of an embedding", one.length]];
		},
	},
	rerank: {
		title: "Order documents",
		labels: ["Query", "Documents, one per line"],
		request: ({ first, lines }) => ({ path: "v1/rerank", body: { query: first, documents: lines } }),
		rows: ({ results }, { lines }) => results.map(({ index, relevance_score: score }) => [lines[index], score]),
	},
	classify: {
		title: "Classify",
		labels: ["Text, for a model of texts"],
		request: ({ first, picture }) => ({
			path: "predict",
			body: { ...(picture ? { image: picture } : { input: first }), top_k: MAX_LABELS },
		}),
		rows: ({ predictions }) => predictions[0].scores.map(({ label, score }) => [label, score]),
	},
	infer: {
		title: "Compute tensors",
		labels: ["Tensors, as a JSON list; or a text, for a model of texts"],
		request: ({ first }) => ({
			path: "predict",
			body: first.trim().startsWith("[") ? { tensors: readTensors(first) } : { input: first },
		}),
		rows: ({ outputs }) =>
			outputs.map(({ name, shape, datatype, data }) => [`${name}: ${datatype}[${shape}]`, shortened(data)]),
	},
};

export class PredictorForm {
	#session;
	#form = byId("predictor-form");
	#kind = ""; // of the model that is shown; none: it generates text, and the form is hidden
	#isWaiting = false;

	constructor(session) {
		this.#session = session;
		this.#form.addEventListener("submit", (event) => {
			event.preventDefault();
			this.#send();
		});
		this.#form.elements.picture.addEventListener("change", () => this.#showPicture());
	}

	showFrame({ kind = "generate" }) {
		const shown = kind in KINDS ? kind : "";
		if (shown === this.#kind) return;
		this.#kind = shown;
		this.#form.hidden = !shown;
		for (const id of ["playground-form", "request-status", "results"]) byId(id).hidden = Boolean(shown);
		if (!shown) return;
		const { title, labels } = KINDS[shown];
		byId("predictor-title").textContent = title;
		byId("first-label").textContent = labels[0];
		byId("second-label").textContent = labels[1] ?? "";
		byId("second-field").hidden = !labels[1];
		byId("picture-field").hidden = shown !== "classify";
		this.#show("", []);
	}

	async #send() {
		if (this.#isWaiting) return;
		const { request, rows } = KINDS[this.#kind];
		this.#isWaiting = true;
		this.#show("Waiting for the answer.", []);
		try {
			const fields = await this.#fields();
			const { path, body } = request(fields);
			const answer = await this.#post(path, { model: this.#session.modelName, ...body });
			this.#show("Done.", rows(answer, fields));
		} catch (error) {
			this.#show(error.message, [], true);
		}
		this.#isWaiting = false;
	}

	async #fields() {
		const { first, second, picture } = this.#form.elements;
		const [file] = this.#kind === "classify" ? picture.files : [];
		const lines = second.value.split("\n").filter((line) => line.trim());
		return { first: first.value, second: second.value, lines, picture: file && (await readAsDataUrl(file)) };
	}

	async #post(path, body) {
		const headers = { "Content-Type": "application/json", ...this.#session.headers() };
		const sent = fetch(path, { method: "POST", headers, body: JSON.stringify(body), cache: "no-store" });
		const response = await sent.catch(() => {
			throw new Error("The server cannot be reached.");
		});
		if (response.ok) return response.json();
		throw new Error(response.status === 401 ? this.#session.requireKey() : await describeErrorResponse(response));
	}

	async #showPicture() {
		const [file] = this.#form.elements.picture.files;
		const shown = file && createElement("img", { src: await readAsDataUrl(file), alt: "The chosen picture" });
		byId("picture").replaceChildren(...(shown ? [shown] : []));
	}

	#show(status, rows, isError = false) {
		byId("prediction-status").textContent = neutralize(status);
		byId("prediction-status").className = isError ? "bad" : "";
		const cells = ([name, number]) => [
			createElement("th", { scope: "row", textContent: neutralize(name) }),
			createElement("td", { textContent: typeof number === "string" ? neutralize(number) : asText(number) }),
		];
		byId("predictions").replaceChildren(...rows.map((row) => createElement("tr", {}, ...cells(row))));
	}
}

function asText(number) {
	return Number.isInteger(number) ? number : number.toFixed(4);
}

function readTensors(text) {
	try {
		return JSON.parse(text);
	} catch {
		const example = '[{"name": "A", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]';
		throw new Error(`The tensors are not valid JSON. Send, for example: ${example}`);
	}
}

function shortened(data) {
	const numbers = [data].flat(Infinity);
	return numbers.slice(0, MAX_NUMBERS).join(", ") + (numbers.length > MAX_NUMBERS ? ", …" : "");
}

function cosine(one, other) {
	const dot = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);
	return dot(one, other) / Math.sqrt(dot(one, one) * dot(other, other));
}

function readAsDataUrl(file) {
	return new Promise((resolve, reject) => {
		const reader = new FileReader();
		reader.onload = () => resolve(reader.result);
		reader.onerror = () => reject(new Error("The browser cannot read the file."));
		reader.readAsDataURL(file);
	});
}
