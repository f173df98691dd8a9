// What on a page is hard to read, to touch or to hear: text that differs from its ground by less than 4.5 to 1
// (WCAG 1.4.3), targets of less than 24 pixels (2.5.8), pictures and buttons without a name (1.1.1).
() => {
	const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
	const rgba = (colour) => {
		pixel.clearRect(0, 0, 1, 1);
		pixel.fillStyle = colour;
		pixel.fillRect(0, 0, 1, 1);
		const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
		return [r, g, b, a / 255];
	};
	const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
	const ground = (element) => {
		const layers = [];
		for (; element; element = element.parentElement) {
			layers.unshift(rgba(getComputedStyle(element).backgroundColor));
		}
		return layers.reduce((below, top) => over(top, below), [255, 255, 255, 1]);
	};
	const luminance = (colour) => {
		const [r, g, b] = colour.map((c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
		return 0.2126 * r + 0.7152 * g + 0.0722 * b;
	};
	const contrast = (colour, below) => {
		const [one, two] = [luminance(over(rgba(colour), below)), luminance(below)];
		return (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
	};
	const targets = "a[href], button, textarea, select, input:not([type=checkbox], [type=radio], [type=hidden]), label:has(input)";
	const found = [];
	for (const element of document.querySelectorAll("body *")) {
		const { width, height } = element.getBoundingClientRect();
		const shown = element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
		if (!shown || Math.min(width, height) <= 1 || element.closest("[disabled]")) continue;
		const said = (element.innerText || element.value || "").trim().slice(0, 40);
		const tell = (what) => found.push(`${what}: ${element.tagName} ${element.className} "${said}"`);
		const style = getComputedStyle(element, element.matches(":placeholder-shown") ? "::placeholder" : null);
		const speaks = [...element.childNodes].some((node) => node.nodeType == 3 && node.textContent.trim());
		if (speaks || element.matches("textarea, input:is([type=text], [type=number], :not([type]))")) {
			const ratio = contrast(style.color, ground(element));
			if (ratio < 4.5) tell(`contrast ${ratio.toFixed(2)}`);
		}
		if (element.matches(targets) && Math.min(width, height) < 24) tell(`${width} x ${height} pixels`);
		const name = element.getAttribute("aria-label") || element.title || element.alt || said;
		const named = name || element.querySelector("img[alt]:not([alt=''])");
		if (element.matches("img, button, a[href]") && !named) tell("no name");
	}
	return found;
}
