// Server-sent events out of bytes, however they were cut: within a character, a line, or between \r and \n.

class EventParser {
	#decoder = new TextDecoder();
	#rest = ""; // of a line whose end has not come
	#afterReturn = false; // a \n that comes first belongs to the \r before it
	#type = "";
	#data = [];

	// The events that these bytes complete, as {type, data}.
	push(bytes) {
		let text = this.#decoder.decode(bytes, { stream: true });
		if (!text) return [];
		if (this.#afterReturn && text[0] === "\n") text = text.slice(1);
		this.#afterReturn = text.endsWith("\r");
		const lines = (this.#rest + text).split(/\r\n|\r|\n/);
		this.#rest = lines.pop();
		return lines.map((line) => this.#line(line)).filter(Boolean);
	}

	#line(line) {
		if (line) {
			const [, name, value] = /^([^:]*):? ?(.*)$/s.exec(line); // a comment has no name
			if (name === "data") this.#data.push(value);
			else if (name === "event") this.#type = value;
			return null;
		}
		const event = this.#data.length ? { type: this.#type || "message", data: this.#data.join("\n") } : null;
		this.#type = "";
		this.#data = [];
		return event;
	}
}

// For each piece of a response's body its events, which may be none: somebody said something.
export async function* eventsOf(response) {
	const parser = new EventParser();
	const reader = response.body.getReader();
	try {
		for (;;) {
			const { value, done } = await reader.read();
			if (done) return;
			yield parser.push(value);
		}
	} finally {
		reader.cancel().catch(() => {}); // for whoever stops to listen early
	}
}
