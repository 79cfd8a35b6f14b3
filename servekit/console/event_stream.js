// Parses server-sent events from the pieces of a response. EventSource is not used: it cannot send an Authorization
// header or a POST body.

// Pieces may be cut anywhere: within a character, within a line, or between \r and \n.
class EventParser {
	#decoder = new TextDecoder(); // removes a byte order mark, and keeps the bytes of a character that is cut
	#unfinishedLine = "";
	#endedWithReturn = false; // a \n at the start of the next piece belongs to this \r
	#type = "";
	#data = [];

	// The events that these bytes complete, as {type, data}.
	push(bytes) {
		let text = this.#decoder.decode(bytes, { stream: true });
		if (!text) return [];
		if (this.#endedWithReturn && text[0] === "\n") text = text.slice(1);
		this.#endedWithReturn = text.endsWith("\r");
		const lines = (this.#unfinishedLine + text).split(/\r\n|\r|\n/);
		this.#unfinishedLine = lines.pop();
		return lines.map((line) => this.#parseLine(line)).filter((event) => event !== null);
	}

	// Returns an event if this line completes one, else null.
	#parseLine(line) {
		if (line === "") return this.#finishEvent();
		const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(line); // the field of a comment is empty
		if (field === "data") this.#data.push(value);
		if (field === "event") this.#type = value;
		return null;
	}

	#finishEvent() {
		const event = { type: this.#type || "message", data: this.#data.join("\n") };
		const hasData = this.#data.length > 0; // the specification drops events without data
		this.#type = "";
		this.#data = [];
		return hasData ? event : null;
	}
}

// Yields for each piece of the response's body a list of events. The list is empty when the piece completes none, for
// example a comment: the caller learns that the connection is alive.
export async function* readEvents(response) {
	const parser = new EventParser();
	const reader = response.body.getReader();
	try {
		for (;;) {
			const { value: bytes, done } = await reader.read();
			if (done) return;
			yield parser.push(bytes);
		}
	} finally {
		reader.cancel().catch(() => {}); // closes the connection when the caller stops early
	}
}
