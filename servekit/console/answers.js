// The answers on the page, one card each. What a model says is nobody's words: it is text and nothing else.

import { $, make, seconds } from "./elements.js";

const MOST_SHOWN = 20_000; // characters of an only answer
const MOST_SHOWN_OF_MANY = 4_000;
const CUT_AT_ONCE = 1_000; // or each token that comes would move all that stand before it

// Text in which no character does anything, as long as before: what controls terminals, as its picture.
export function harmless(text) {
	return text
		.replace(/[\0-\x08\x0b-\x1f]/g, (control) => String.fromCharCode(0x2400 + control.charCodeAt(0)))
		.replace(/\x7f/g, "\u2421")
		.replace(/[\x80-\x9f]/g, "\ufffd");
}

export function untrusted(ariaLabel, text = "") {
	// Whoever has no mouse scrolls it, too: hence the index.
	const properties = { className: "untrusted", dir: "auto", tabIndex: 0, role: "group", ariaLabel };
	return make("div", properties, harmless(text.slice(-MOST_SHOWN)));
}

// Of one answer, or of all: tokens, and when they came.
class Count {
	numTokens = 0;

	add(numTokens, atMs) {
		if (!numTokens) return;
		this.numTokens += numTokens;
		this.firstMs ??= atMs;
		this.lastMs = atMs;
	}

	figures() {
		if (!this.numTokens) return [];
		const rate = (1_000 * (this.numTokens - 1)) / (this.lastMs - this.firstMs);
		return [
			[`${this.numTokens} ${this.numTokens === 1 ? "token" : "tokens"}`],
			[make("span", { className: "spelled" }, "first token "), seconds(this.firstMs / 1_000)],
			rate > 0 && rate < Infinity && [`${rate.toFixed(rate < 10 ? 1 : 0)} tok/s`],
		];
	}
}

// Figures, of one or more pieces each.
function line(node, ...figures) {
	node.replaceChildren(...figures.filter(Boolean).flatMap((pieces) => [make("span", {}, ...pieces), " "]));
}

class Card {
	text = "";
	ending = "";
	count = new Count();
	#numCut = 0; // characters that were on the page

	constructor(index, isOnly) {
		this.most = isOnly ? MOST_SHOWN : MOST_SHOWN_OF_MANY;
		this.number = isOnly ? "" : `#${index + 1}`;
		this.figures = make("div", { className: "figures" });
		this.cut = make("p", { className: "cut" });
		this.box = untrusted(`Answer ${this.number}`);
		this.root = make("li", {}, this.figures, this.cut, this.box);
	}

	// Adds what is new: what somebody has selected meanwhile stays so.
	show() {
		const shown = this.box.firstChild;
		shown.appendData(harmless(this.text.slice(this.#numCut + shown.length)));
		const over = shown.length - this.most;
		if (over > CUT_AT_ONCE) {
			shown.deleteData(0, over);
			this.#numCut += over;
			this.cut.textContent = `${this.#numCut} characters before are not shown`;
		}
		line(this.figures, this.number && [this.number], ...this.count.figures(), this.ending && [this.ending]);
		this.root.className = this.ending ? "" : "running";
	}
}

export class Answers {
	#cards = [];
	#fresh = new Set(); // cards that have more to show
	#frame = 0;
	#startedMs = 0;
	#all = new Count();

	begin(count) {
		this.#startedMs = performance.now();
		this.#all = new Count();
		this.#cards = Array.from({ length: count }, (_, index) => new Card(index, count === 1));
		this.#fresh = new Set(this.#cards);
		$("answers").className = count > 1 ? "many" : "";
		$("answers").replaceChildren(...this.#cards.map((card) => card.root));
		this.#show();
	}

	add(index, text, numTokens, ending = "") {
		const card = this.#cards[index];
		if (!card) throw new Error(`The server told of answer ${index + 1}, and was not asked for so many.`);
		const atMs = performance.now() - this.#startedMs;
		card.text += text;
		card.ending = ending;
		card.count.add(numTokens, atMs);
		this.#all.add(numTokens, atMs);
		this.#fresh.add(card);
		this.#frame ||= requestAnimationFrame(() => this.#show());
	}

	// Nothing more will come.
	end(words) {
		for (const card of this.#cards) card.ending ||= words;
		this.#fresh = new Set(this.#cards);
		this.#show();
	}

	get first() {
		return this.#cards[0].text;
	}

	// Reads all places first and writes then, so that the page is laid out once.
	#show() {
		cancelAnimationFrame(this.#frame);
		this.#frame = 0;
		const atEnd = [...this.#fresh].filter(({ box }) => box.scrollTop + box.clientHeight >= box.scrollHeight - 8);
		for (const card of this.#fresh) card.show();
		this.#fresh.clear();
		for (const { box } of atEnd) box.scrollTop = 1e9;
		const count = this.#cards.length;
		line($("total"), ...(count > 1 ? [[`${count} answers`], ...this.#all.figures()] : []));
	}
}
