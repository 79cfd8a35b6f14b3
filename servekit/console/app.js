// Entry point: makes the two halves of the page, the playground and the scheduler view, and connects them with the live
// feed and the API key.

import { byId, runGuarded, setText } from "./dom.js";
import { LiveFeed } from "./live_feed.js";
import { ModelChoice } from "./model_choice.js";
import { Playground } from "./playground.js";
import { PredictorForm } from "./predictor_form.js";

const STATE_COLOURS = { ready: "good", failed: "bad" }; // others, such as loading and draining: warn

// What both halves share. The API key is kept in this variable only, so a reload of the page forgets it.
const session = {
	apiKey: "",
	modelName: "",
	headers() {
		return session.apiKey ? { Authorization: `Bearer ${session.apiKey}` } : {};
	},
	// Shows the key field after a 401. Returns the reason as text.
	requireKey() {
		byId("key-form").hidden = false;
		return session.apiKey
			? "The server does not know this API key."
			: "The server needs an API key. Enter it at the top of the page.";
	},
	// Marks the sequences of this request as the page's own.
	addOwnRequest(requestId) {
		withSchedulerView((view) => view.addOwnRequest(requestId));
	},
};

let schedulerView = null; // stays null if its module cannot be loaded

function withSchedulerView(action) {
	runGuarded("scheduler view", () => schedulerView && action(schedulerView));
}

function showServerState(text, colourClass) {
	setText(byId("server-state"), text);
	byId("dot").className = colourClass;
}

const feed = new LiveFeed({
	headers: session.headers,
	onUnauthorized: session.requireKey,
	onConnected() {
		byId("key-form").hidden = true;
	},
	onFrame(state) {
		const text = state.state === "ready" ? "ready" : `${state.state}: ${state.stage}`;
		showServerState(text, STATE_COLOURS[state.state] ?? "warn");
		session.modelName = state.model_name;
		modelChoice.showFrame(state);
		runGuarded("form of the model", () => predictorForm.showFrame(state));
		withSchedulerView((view) => view.showFrame(state));
	},
	onDisconnected(reason) {
		showServerState(reason, "bad");
		withSchedulerView((view) => view.showDisconnected(reason));
	},
});

const predictorForm = new PredictorForm(session);
const modelChoice = new ModelChoice((name) => feed.showModel(name));

byId("key-form").addEventListener("submit", (event) => {
	event.preventDefault();
	session.apiKey = byId("key").value;
	byId("key").value = ""; // or a browser could offer to store it
	byId("key-form").hidden = true;
	byId("text").focus();
	feed.connectNow();
});

runGuarded("playground", () => new Playground(session));
await runGuarded("scheduler view", async () => {
	const { SchedulerView } = await import("./scheduler_view.js"); // imported late: the playground works without it
	schedulerView = new SchedulerView(byId("scheduler-view"), session.headers);
});
feed.run();
