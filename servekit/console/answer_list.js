// The answers to the newest request, a card for each. A model's output is untrusted: it is shown as text only.

import { byId, createElement } from "./dom.js";
import { formatSeconds } from "./format.js";

const MAX_CHARACTERS = 20_000; // on the page, of a single answer
const MAX_CHARACTERS_OF_MANY = 4_000; // of each of several
const MAX_REASONING_CHARACTERS = 2_000; // of each answer; this text is set anew at each change
// Text is removed at the front in pieces of this size. If each new token removed some, all the text would move each time.
const MIN_CUT = 1_000;
const AT_END_TOLERANCE = 8; // CSS pixels from the end at which a scrolled box still follows new text

// Shows control characters as pictures (␛), so that none has an effect. The length stays the same.
export function neutralize(text) {
	return text
		.replace(/[\0-\x08\x0b-\x1f]/g, (control) => String.fromCharCode(0x2400 + control.charCodeAt(0)))
		.replace(/\x7f/g, "\u2421")
		.replace(/[\x80-\x9f]/g, "\ufffd");
}

// A box for text that may hold anything.
export function createUntrustedBox(ariaLabel, text = "") {
	// tabIndex: users without a mouse can focus and scroll it.
	const properties = { className: "untrusted", dir: "auto", tabIndex: 0, role: "group", ariaLabel };
	return createElement("div", properties, neutralize(text.slice(-MAX_CHARACTERS)));
}

// When tokens came, of one answer or of all together. Times are in ms since the request was sent.
class TokenTimes {
	numTokens = 0;
	firstMs = null;
	lastMs = null;

	add(numTokens, timeMs) {
		if (!numTokens) return;
		this.numTokens += numTokens;
		this.firstMs ??= timeMs;
		this.lastMs = timeMs;
	}

	// For showFigures.
	figures() {
		if (!this.numTokens) return [];
		const figures = [
			[`${this.numTokens} ${this.numTokens === 1 ? "token" : "tokens"}`],
			[createElement("span", { className: "spelled" }, "first token "), formatSeconds(this.firstMs / 1_000)],
		];
		// The first token is not counted: its time is shown separately. Tokens that all came at once have no speed.
		const tokensPerS = (1_000 * (this.numTokens - 1)) / (this.lastMs - this.firstMs);
		if (tokensPerS > 0 && tokensPerS < Infinity) figures.push([`${tokensPerS.toFixed(tokensPerS < 10 ? 1 : 0)} tok/s`]);
		return figures;
	}
}

// `figures`: each a list of strings and nodes. A line may break between figures only.
function showFigures(node, figures) {
	node.replaceChildren(...figures.flatMap((pieces) => [createElement("span", {}, ...pieces), " "]));
}

class AnswerCard {
	text = "";
	reasoning = ""; // the end of what the model wrote before its answer
	ending = ""; // why the answer ended; empty while it streams
	times = new TokenTimes();

	#numRemoved = 0; // characters that were removed from the front of the box
	#maxCharacters;
	#number;

	constructor(index, isOnly) {
		this.#maxCharacters = isOnly ? MAX_CHARACTERS : MAX_CHARACTERS_OF_MANY;
		this.#number = isOnly ? "" : `#${index + 1}`;
		this.figures = createElement("div", { className: "figures" });
		this.cutNote = createElement("p", { className: "cut" });
		this.box = createUntrustedBox(`Answer ${this.#number}`.trim());
		this.reasoningNote = createElement("p", { className: "reasoning", dir: "auto" });
		this.node = createElement("li", {}, this.figures, this.reasoningNote, this.cutNote, this.box);
	}

	// Appends what is new. The text before it stays, and so does the user's selection.
	show() {
		const shown = this.box.firstChild;
		shown.appendData(neutralize(this.text.slice(this.#numRemoved + shown.length)));
		const numExcess = shown.length - this.#maxCharacters;
		if (numExcess > MIN_CUT) {
			shown.deleteData(0, numExcess);
			this.#numRemoved += numExcess;
			this.cutNote.textContent = `The first ${this.#numRemoved} characters are not shown.`;
		}
		if (this.reasoning) this.reasoningNote.textContent = neutralize(this.reasoning);
		const figures = this.times.figures();
		if (this.#number) figures.unshift([this.#number]);
		if (this.ending) figures.push([this.ending]);
		showFigures(this.figures, figures);
		this.node.classList.toggle("running", !this.ending);
	}
}

export class AnswerList {
	#cards = [];
	#changedCards = new Set();
	#animationFrame = 0;
	#startedMs = 0;
	#allTimes = new TokenTimes();

	// `scrollBox`: the element that scrolls the cards, if one does. It follows new text like a card's own box.
	constructor(scrollBox) {
		this.scrollBox = scrollBox;
	}

	start(numAnswers) {
		this.#startedMs = performance.now();
		this.#allTimes = new TokenTimes();
		this.#cards = Array.from({ length: numAnswers }, (_, index) => new AnswerCard(index, numAnswers === 1));
		this.#changedCards = new Set(this.#cards);
		byId("answers").className = numAnswers > 1 ? "many" : "";
		byId("answers").replaceChildren(...this.#cards.map((card) => card.node));
		this.#show();
	}

	clear() {
		this.start(0);
	}

	append(index, text, numTokens, ending = "", reasoning = "") {
		const card = this.#cards[index];
		if (!card) throw new Error(`The server sent answer ${index + 1}, and ${this.#cards.length} were requested.`);
		const timeMs = performance.now() - this.#startedMs;
		card.text += text;
		card.reasoning = (card.reasoning + reasoning).slice(-MAX_REASONING_CHARACTERS);
		card.ending = ending;
		card.times.add(numTokens, timeMs);
		this.#allTimes.add(numTokens, timeMs);
		this.#changedCards.add(card);
		this.#animationFrame ||= requestAnimationFrame(() => this.#show());
	}

	// No more text will come. `ending` is for answers that did not end by themselves.
	finish(ending = "") {
		for (const card of this.#cards) card.ending ||= ending;
		this.#changedCards = new Set(this.#cards);
		this.#show();
	}

	get firstText() {
		return this.#cards[0]?.text ?? "";
	}

	// Reads all scroll positions before it writes, so that the browser lays the page out once.
	#show() {
		cancelAnimationFrame(this.#animationFrame);
		this.#animationFrame = 0;
		const boxes = [...this.#changedCards].map((card) => card.box);
		const boxesAtEnd = [...boxes, this.scrollBox].filter(isScrolledToEnd);
		for (const card of this.#changedCards) card.show();
		this.#changedCards.clear();
		for (const box of boxesAtEnd) scrollToEnd(box);
		const numAnswers = this.#cards.length;
		showFigures(byId("total"), numAnswers > 1 ? [[`${numAnswers} answers`], ...this.#allTimes.figures()] : []);
	}
}

function isScrolledToEnd(box) {
	return box.scrollTop + box.clientHeight >= box.scrollHeight - AT_END_TOLERANCE;
}

export function scrollToEnd(box) {
	box.scrollTop = box.scrollHeight;
}
