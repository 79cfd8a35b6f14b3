// The playground: sends a prompt or a chat message with the parameters of the form, and shows the answers as they stream.

import { AnswerList, createUntrustedBox, neutralize, scrollToEnd } from "./answer_list.js";
import { toCurl, toPython } from "./code_export.js";
import { buildRequest, MAIN_PARAMETERS, SAMPLING_PARAMETERS } from "./completion_request.js";
import { byId, createElement } from "./dom.js";
import { describeErrorResponse } from "./error_response.js";
import { readEvents } from "./event_stream.js";

const STRUCTURE_EXAMPLES = {
	json: '{"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}}',
	regex: "(The sky|It) is (blue|red)",
	choice: "blue\nred",
	grammar: 'start: "The sky is " COLOR\nCOLOR: "blue" | "red"',
};

export class Playground {
	#session;
	#form = byId("playground-form");
	#answers = new AnswerList(byId("conversation"));
	#turns = []; // the whole turns of the chat so far, as messages of the API; "New chat" makes a new list
	#lastAnswerIsCard = false; // the answer of the last turn is still shown as a card, with its figures
	#request = null; // AbortController while a request is under way

	constructor(session) {
		this.#session = session;
		byId("main-parameters").append(...MAIN_PARAMETERS.map(createNumberField));
		byId("sampling-parameters").append(...SAMPLING_PARAMETERS.map(createNumberField));
		this.#form.elements.max_tokens.value = 64;
		this.#form.addEventListener("submit", (event) => {
			event.preventDefault();
			this.#send();
		});
		this.#form.addEventListener("keydown", (event) => {
			if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
			event.preventDefault(); // or Enter in an input submits a second time
			this.#form.requestSubmit();
		});
		this.#form.addEventListener("change", ({ target }) => {
			if (target.name === "mode" && !this.#request) this.#showTranscript();
			this.#updateForm();
		});
		// An invalid field inside a closed <details> could not be shown by the browser.
		const openDetailsOf = ({ target }) => target.closest("details")?.setAttribute("open", "");
		this.#form.addEventListener("invalid", openDetailsOf, { capture: true });
		document.addEventListener("keydown", ({ key }) => {
			if (key === "Escape" && !byId("copy-dialog").open) this.#stop();
		});
		byId("stop-button").onclick = () => this.#stop();
		byId("new-chat").onclick = () => this.#startNewChat();
		byId("copy-curl").onclick = () => this.#copy("curl", toCurl);
		byId("copy-python").onclick = () => this.#copy("Python", toPython);
		this.#updateForm();
	}

	get #isChat() {
		return this.#form.elements.mode.value === "chat";
	}

	#buildRequest() {
		return buildRequest(this.#form, this.#session.modelName, this.#isChat ? this.#turns : null);
	}

	// -- one request

	async #send() {
		if (this.#request) return;
		const { path, body } = this.#buildRequest();
		const question = byId("text").value;
		const turns = this.#isChat ? this.#turns : null; // "New chat" may replace the list before the answer ends
		const request = new AbortController();
		this.#request = request;
		this.#lastAnswerIsCard = false;
		if (turns) {
			byId("text").value = "";
			this.#showTranscript(question);
		}
		this.#answers.start(body.n ?? 1);
		this.#placeAnswers();
		this.#updateForm();
		this.#showStatus(body.n ? `Waiting for ${body.n} answers.` : "Waiting for the answer.");
		try {
			await this.#receiveAnswers(path, body, request.signal);
			this.#answers.finish();
			// A whole turn becomes part of the chat. With several answers, the chat continues from the first.
			turns?.push({ role: "user", content: question }, { role: "assistant", content: this.#answers.firstText });
			this.#lastAnswerIsCard = turns === this.#turns;
			this.#showStatus("Done.");
		} catch (error) {
			const wasStopped = request.signal.aborted;
			this.#answers.finish(wasStopped ? "stopped" : "cut off");
			this.#showStatus(wasStopped ? "Stopped." : error.message, !wasStopped);
			if (turns === this.#turns) {
				// The message goes back into its field, to be edited or sent again. What was typed meanwhile is kept.
				byId("text").value = [question, byId("text").value].filter(Boolean).join("\n");
				this.#showTranscript();
			}
		}
		request.abort(); // frees the connection if the response was not read to its end
		this.#request = null;
		this.#updateForm();
	}

	// Returns when each answer has ended by itself. Otherwise throws an Error whose message is for the user.
	async #receiveAnswers(path, body, signal) {
		const requestId = `ui-${crypto.getRandomValues(new Uint32Array(4)).join("-")}`;
		this.#session.addOwnRequest(requestId);
		const headers = { "Content-Type": "application/json", "X-Request-Id": requestId, ...this.#session.headers() };
		const sent = fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal, cache: "no-store" });
		const response = await withMessage(sent, "The server cannot be reached.");
		if (!response.ok) {
			this.#answers.clear(); // a refused request has no answers, not even empty ones
			throw new Error(response.status === 401 ? this.#session.requireKey() : await describeErrorResponse(response));
		}
		const pieces = readEvents(response);
		let numTokens = 0;
		for (;;) {
			const { value: events, done } = await withMessage(pieces.next(), "The connection broke before the answer ended.");
			if (done) throw new Error("The stream ended without its end mark. The answer may be incomplete.");
			for (const { data } of events) {
				if (data === "[DONE]") return;
				const chunk = JSON.parse(data);
				if (chunk.error) throw new Error(`The request failed: ${chunk.error.message}`);
				numTokens = this.#addChunk(chunk, numTokens);
			}
		}
	}

	// The usage counts the tokens of the whole request so far, so the difference belongs to this chunk. Returns the count.
	#addChunk(chunk, numTokensBefore) {
		const numTokens = Math.max(numTokensBefore, chunk.usage?.completion_tokens ?? 0);
		for (const choice of chunk.choices) {
			const text = choice.text ?? choice.delta.content ?? "";
			const reasoning = choice.delta?.reasoning_content ?? "";
			this.#answers.append(choice.index, text, numTokens - numTokensBefore, describeEnding(choice), reasoning);
			if (choice.finish_reason === "abort") throw new Error("The request's deadline passed before the answer ended.");
		}
		return numTokens;
	}

	#stop() {
		this.#request?.abort();
	}

	// -- the chat

	#startNewChat() {
		this.#stop();
		this.#turns = [];
		this.#lastAnswerIsCard = false;
		this.#answers.clear();
		this.#showStatus("");
		this.#showTranscript();
		byId("text").focus();
	}

	// In a chat the conversation stands above the message field, in order: the newest answer is last, next to the field. The
	// answers to a prompt stand below the form.
	#placeAnswers() {
		if (this.#isChat) byId("conversation").append(byId("results"));
		else byId("playground").append(byId("results"));
		scrollToEnd(byId("conversation"));
	}

	// Shows the turns so far, and `question` as the last one while it is being answered. The answer of the last turn is left
	// out if it follows as a card.
	#showTranscript(question = null) {
		const turns = this.#lastAnswerIsCard ? this.#turns.slice(0, -1) : [...this.#turns];
		if (question !== null) turns.push({ role: "user", content: question });
		const items = turns.map(({ role, content }) => {
			const label = createElement("span", { className: "role" }, role);
			return createElement("li", { className: role }, label, createUntrustedBox(role, content));
		});
		byId("transcript").replaceChildren(...items);
	}

	// -- the form

	#updateForm() {
		byId("text-label").textContent = this.#isChat ? "Message" : "Prompt";
		byId("new-chat").hidden = !this.#isChat;
		byId("system-field").hidden = !this.#isChat;
		// A chat's answer that streams stays in sight if the user switches to a prompt meanwhile.
		const isAnswering = this.#request !== null && byId("conversation").contains(byId("results"));
		byId("conversation").hidden = !this.#isChat && !isAnswering;
		const { structure, structure_text: structureText } = this.#form.elements;
		byId("structure-field").hidden = !structure.value;
		structureText.required = Boolean(structure.value);
		structureText.placeholder = STRUCTURE_EXAMPLES[structure.value] ?? "";
		// Not `disabled`: a button that loses the focus while its user waits sends them to the top of the page.
		byId("send-button").ariaDisabled = String(Boolean(this.#request));
		byId("stop-button").ariaDisabled = String(!this.#request);
	}

	// A screen reader announces the status: the start and end of a request and its failure, never single tokens.
	#showStatus(text, isError = false) {
		byId("request-status").textContent = neutralize(text);
		byId("request-status").className = isError ? "bad" : "";
	}

	async #copy(language, write) {
		if (!this.#form.reportValidity()) return;
		const code = write(this.#buildRequest(), document.baseURI, Boolean(this.#session.apiKey));
		try {
			await navigator.clipboard.writeText(code);
			this.#showStatus(`Copied as ${language}.`);
		} catch {
			// Browsers have no clipboard for pages on plain http, other than localhost's.
			byId("copy-title").textContent = `Copy as ${language}`;
			byId("copy-text").value = code;
			byId("copy-dialog").showModal();
			byId("copy-text").select();
		}
	}
}

function createNumberField(name) {
	const isInteger = /tokens|top_k|seed/.test(name);
	const input = createElement("input", { name, type: "number", step: isInteger ? 1 : "any" });
	// Beyond these, a browser does not count exactly, and another seed would be sent.
	if (name === "seed") Object.assign(input, { min: Number.MIN_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER });
	const label = name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");
	return createElement("label", { className: "field" }, label, input);
}

// The promise, with another message if it fails.
async function withMessage(promise, message) {
	try {
		return await promise;
	} catch {
		throw new Error(message);
	}
}

function describeEnding({ finish_reason: finishReason, stop_reason: stopReason }) {
	if (finishReason === "length") return "reached max tokens";
	if (finishReason !== "stop") return finishReason ?? "";
	return typeof stopReason === "string" ? `stop string ${neutralize(JSON.stringify(stopReason))}` : "end of text";
}
