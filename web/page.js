() => {
	// Gradio shows images without a text in their place: their file's name is one.
	const name = () => {
		for (const image of document.querySelectorAll("img:not([alt]), img[alt='']")) {
			image.alt = "Image " + decodeURIComponent(new URL(image.src, location).pathname.split("/").pop());
		}
	};
	const watch = { childList: true, subtree: true, attributes: true, attributeFilter: ["src", "alt"] };
	new MutationObserver(name).observe(document.body, watch);
	name();
	// A thing on the image and its name below light up together.
	const light = ({ target }) => {
		const thing = target.closest("[data-thing]")?.dataset.thing;
		for (const one of document.querySelectorAll("[data-thing]")) {
			one.classList.toggle("lit", one.dataset.thing === thing);
		}
	};
	for (const event of ["mouseover", "focusin"]) {
		document.addEventListener(event, light);
	}
}
