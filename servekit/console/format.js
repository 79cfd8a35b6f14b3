// Numbers as text.

const INTEGER = new Intl.NumberFormat("en");
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const formatCount = (number = 0) => INTEGER.format(number);

// 12,345 becomes 12.3K: for places with little room.
export const formatCompact = (number = 0) => (number < 10_000 ? formatCount(number) : COMPACT.format(number));

export const formatPercent = (part = 0, whole = 0) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

export function formatSeconds(timeS) {
	if (timeS == null) return "–";
	// From 0.9995 s on, milliseconds would round to "1000 ms".
	return timeS < 0.9995 ? `${Math.round(timeS * 1000)} ms` : `${timeS.toFixed(1)} s`;
}
