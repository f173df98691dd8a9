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
	const light = () => {
		const chosen = [...document.querySelectorAll("[data-thing]:is(:hover, :focus)")].map((one) => one.dataset.thing);
		for (const one of document.querySelectorAll("[data-thing]")) {
			one.classList.toggle("lit", chosen.includes(one.dataset.thing));
		}
	};
	for (const event of ["mouseover", "focusin", "focusout"]) {
		document.addEventListener(event, light);
	}
	// The conversation's column ends with the window: see page.css.
	const measure = () => {
		const talk = document.getElementById("talk");
		if (talk?.offsetParent) {
			const above = talk.getBoundingClientRect().top + window.scrollY;
			document.documentElement.style.setProperty("--above", `${Math.round(above)}px`);
		}
	};
	new ResizeObserver(measure).observe(document.body);
	measure();
}
