// Gradio shows pictures without a text in their place: their file's name is one.
() => {
	const name = () => {
		for (const picture of document.querySelectorAll("img:not([alt]), img[alt='']")) {
			picture.alt = "Picture " + decodeURIComponent(new URL(picture.src, location).pathname.split("/").pop());
		}
	};
	const watch = { childList: true, subtree: true, attributes: true, attributeFilter: ["src", "alt"] };
	new MutationObserver(name).observe(document.body, watch);
	name();
}
