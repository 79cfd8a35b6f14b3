// Play: a prompt or a chat, sent as the form says, and its answers as they come.

import { Answers, harmless, untrusted } from "./answers.js";
import { $, make } from "./elements.js";
import { asCurl, asPython, FIRST_NUMBERS, MORE_NUMBERS, requestOf } from "./request.js";
import { eventsOf } from "./sse.js";

const EXAMPLES = {
	json: '{"enum": ["blue", "red"]}',
	regex: "(The sky|It) is (blue|red)",
	choice: "blue",
	grammar: 'start: "It is " ("blue" | "red")',
};

export class Play {
	#page;
	#form = $("play-form");
	#answers = new Answers();
	#messages = []; // of the chat: whole turns only
	#stream = null; // an AbortController while answers come

	constructor(page) {
		this.#page = page;
		$("first-fields").append(...FIRST_NUMBERS.map(numberField));
		$("more-fields").append(...MORE_NUMBERS.map(numberField));
		this.#form.elements.max_tokens.value = 64;
		this.#form.onsubmit = (event) => {
			event.preventDefault();
			this.#send();
		};
		this.#form.onkeydown = (event) => {
			if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
			event.preventDefault(); // a field would send it once more
			this.#form.requestSubmit();
		};
		this.#form.onchange = ({ target }) => {
			if (target.name === "mode" && !this.#stream) this.#showChat();
			this.#showForm();
		};
		this.#form.addEventListener("invalid", ({ target }) => target.closest("details")?.setAttribute("open", ""), true);
		document.addEventListener("keydown", ({ key }) => {
			if (key === "Escape" && !$("copy-dialog").open) this.#stream?.abort();
		});
		$("stop-button").onclick = () => this.#stream?.abort();
		$("new-chat").onclick = () => this.#newChat();
		$("copy-curl").onclick = () => this.#copy("curl", asCurl);
		$("copy-python").onclick = () => this.#copy("Python", asPython);
		this.#showForm();
	}

	get #isChat() {
		return this.#form.elements.mode.value === "chat";
	}

	#request() {
		return requestOf(this.#form, this.#page.modelName, this.#isChat ? this.#messages : null);
	}

	async #send() {
		if (this.#stream) return;
		const { path, body } = this.#request();
		const question = $("text").value;
		const messages = this.#isChat ? this.#messages : null;
		const stream = (this.#stream = new AbortController());
		this.#answers.begin(body.n ?? 1);
		this.#showForm();
		this.#say(body.n ? `${body.n} answers are on their way.` : "The answer is on its way.");
		if (messages) {
			$("text").value = "";
			this.#showChat(question);
		}
		try {
			await this.#receive(path, body, stream.signal);
			this.#answers.end("");
			// Of several answers the first one is the chat's.
			messages?.push({ role: "user", content: question }, { role: "assistant", content: this.#answers.first });
			this.#say("Done.");
		} catch (error) {
			const isStopped = stream.signal.aborted;
			this.#answers.end(isStopped ? "stopped" : "cut off");
			this.#say(isStopped ? "Stopped." : error.message, !isStopped);
			if (messages === this.#messages) {
				$("text").value = [question, $("text").value].filter(Boolean).join("\n");
				this.#showChat();
			}
		}
		stream.abort(); // if it is not read to its end
		this.#stream = null;
		this.#showForm();
	}

	// Returns when every answer has ended by itself. Else throws an Error in words.
	async #receive(path, body, signal) {
		const requestId = `ui-${crypto.getRandomValues(new Uint32Array(4)).join("-")}`;
		this.#page.mine(requestId);
		const headers = { "Content-Type": "application/json", "X-Request-Id": requestId, ...this.#page.headers() };
		const asked = fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal, cache: "no-store" });
		const response = await orSay(asked, "The server cannot be reached.");
		if (!response.ok) this.#answers.begin(0);
		if (response.status === 401) throw new Error(this.#page.wantKey());
		if (!response.ok) throw new Error(await reasonOf(response));
		const pieces = eventsOf(response);
		let numTokens = 0;
		for (;;) {
			const { value: events, done } = await orSay(pieces.next(), "The connection broke before the answer was whole.");
			if (done) throw new Error("The stream ended without its mark of the end: the answer may not be whole.");
			for (const { data } of events) {
				if (data === "[DONE]") return;
				const chunk = JSON.parse(data);
				if (chunk.error) throw new Error(`The server gave up: ${chunk.error.message}`);
				// The usage is the whole request's so far: what is new of it is this chunk's.
				const usage = Math.max(numTokens, chunk.usage?.completion_tokens ?? 0);
				for (const choice of chunk.choices) {
					this.#answers.add(choice.index, choice.text ?? choice.delta.content ?? "", usage - numTokens, endingOf(choice));
					if (choice.finish_reason === "abort") throw new Error("Its deadline passed before the answer was whole.");
				}
				numTokens = usage;
			}
		}
	}

	#newChat() {
		this.#stream?.abort();
		this.#messages = [];
		this.#answers.begin(0);
		this.#say("");
		this.#showChat();
		$("text").focus();
	}

	// The turns so far; a `question` that is being answered is the last.
	#showChat(question) {
		const turns = question === undefined ? this.#messages : [...this.#messages, { role: "user", content: question }];
		$("transcript").replaceChildren(
			...turns.map(({ role, content }) =>
				make("li", { className: role }, make("span", { className: "role" }, role), untrusted(role, content)),
			),
		);
		$("transcript").scrollTop = 1e9;
	}

	#showForm() {
		$("text-label").textContent = this.#isChat ? "Message" : "Prompt";
		$("new-chat").hidden = !this.#isChat;
		$("transcript").hidden = !this.#isChat;
		const { structure, structure_text: text } = this.#form.elements;
		$("structure-field").hidden = !structure.value;
		text.required = Boolean(structure.value);
		text.placeholder = EXAMPLES[structure.value] ?? "";
		$("send-button").ariaDisabled = Boolean(this.#stream);
		$("stop-button").ariaDisabled = !this.#stream;
	}

	// Read out by a screen reader: a request's beginning, its end, what went wrong; never its tokens.
	#say(words, isBad = false) {
		$("play-status").textContent = harmless(words);
		$("play-status").className = isBad ? "bad" : "";
	}

	async #copy(name, write) {
		if (!this.#form.reportValidity()) return;
		const text = write(this.#request(), document.baseURI, Boolean(this.#page.key));
		try {
			await navigator.clipboard.writeText(text); // there is none for a page that comes by plain http from elsewhere
			this.#say(`Copied as ${name}.`);
		} catch {
			$("copy-title").textContent = `Copy as ${name}`;
			$("copy-text").value = text;
			$("copy-dialog").showModal();
			$("copy-text").select();
		}
	}
}

function numberField(name) {
	const input = make("input", { name, type: "number", step: /tokens|top_k|seed/.test(name) ? 1 : "any" });
	if (name === "seed") Object.assign(input, { min: Number.MIN_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER });
	return make("label", { className: "field" }, name[0].toUpperCase() + name.slice(1).replace("_", " "), input);
}

const orSay = (promise, words) => promise.catch(() => Promise.reject(new Error(words)));

// Why a response is no answer: in the server's words, if it has some.
export async function reasonOf(response) {
	const { error } = await response.json().catch(() => ({}));
	const told = error?.message ?? `The server answered ${response.status} ${response.statusText}.`;
	const waitS = response.headers.get("Retry-After");
	const more = [told.includes(error?.param) ? "" : error?.param, waitS && `try again in ${waitS} s`].filter(Boolean);
	return more.length ? `${told} (${more.join("; ")})` : told;
}

function endingOf({ finish_reason: reason, stop_reason: stop }) {
	if (reason === "stop") return typeof stop === "string" ? `ended at ${harmless(JSON.stringify(stop))}` : "ended by itself";
	return reason === "length" ? "hit max tokens" : (reason ?? "");
}
