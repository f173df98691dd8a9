() => {
	const settings = SETTINGS;  // see `settings_of_page_js`
	const $ = (selector) => document.querySelector(selector);

	// Gradio shows images without a text in their place: their file's name is one.
	const name = () => {
		for (const image of document.querySelectorAll("img:not([alt]), img[alt='']")) {
			image.alt = "Image " + decodeURIComponent(new URL(image.src, location).pathname.split("/").pop());
		}
	};
	const watch = { childList: true, subtree: true, attributes: true, attributeFilter: ["src", "alt"] };
	new MutationObserver(name).observe(document.body, watch);
	name();

	// A thing on the image and its name below light up together, in the answer that both stand in.
	const light = () => {
		const chosen = [...document.querySelectorAll("[data-thing]:is(:hover, :focus)")];
		for (const one of document.querySelectorAll("[data-thing]")) {
			const lit = chosen.some((other) => other.dataset.thing == one.dataset.thing
				&& other.closest(".located") == one.closest(".located"));
			one.classList.toggle("lit", lit);
		}
	};
	for (const event of ["mouseover", "focusin", "focusout"]) {
		document.addEventListener(event, light);
	}

	// The conversation's column ends with the window: see page.css.
	const measure = () => {
		const talk = $("#talk");
		if (talk?.offsetParent) {
			const above = talk.getBoundingClientRect().top + window.scrollY;
			document.documentElement.style.setProperty("--above", `${Math.round(above)}px`);
		}
	};
	new ResizeObserver(measure).observe(document.body);
	measure();

	// ------------------------------------------------------------------- images of the visitor's own
	// Their paths, also after the page was loaded anew: an image in a box that is not among them is an example.
	const own = new Set();
	const kept = (change) => {
		try {
			change(sessionStorage);
		} catch {
			// A browser may be set up to keep nothing: then the page starts afresh when it is loaded anew.
		}
	};
	kept((store) => JSON.parse(store.ocelliImages ?? "[]").forEach((path) => own.add(path)));
	const arrived = {};  // box -> what is handed over, and how to say that it has been
	let reading = Promise.resolve(), readings = 0;

	const number = (value) => value.toLocaleString("en");
	const tooMuch = (file, most, what, got) =>
		`'${file.name}': expected at most ${number(most)} ${what}, got ${number(got)}; shrink the image`;

	// It grows when a model is opened that sees more, or whose boxes depend on the size of the file.
	const edge = async () => {
		const asked = { method: "POST", headers: { "content-type": "application/json" }, body: '{"data": []}' };
		const answer = await fetch("gradio_api/run/edge", asked);
		return (await answer.json()).data[0];
	};
	// A smaller copy of an image that is larger than any model here sees, upright, and with the image's own
	// size in its first bytes (see web/pictures.py). What this browser does not read, and what the server
	// would not, goes there as it is.
	const smaller = async (file) => {
		const image = new Image(), url = URL.createObjectURL(file);
		try {
			image.src = url;
			await image.decode();
			const { naturalWidth: width, naturalHeight: height } = image;
			if (width * height > settings.pixels) {
				throw tooMuch(file, settings.pixels, "pixels", width * height);
			}
			const scale = await edge() / Math.max(width, height);
			const whole = ["image/svg+xml", "image/gif"];  // a copy would not move
			if (scale >= 1 || whole.includes(file.type) || await endsEarly(file)) {
				return file;
			}
			const canvas = document.createElement("canvas");
			canvas.width = Math.max(1, Math.round(width * scale));
			canvas.height = Math.max(1, Math.round(height * scale));
			const pen = canvas.getContext("2d");
			pen.fillStyle = "white";
			pen.fillRect(0, 0, canvas.width, canvas.height);
			pen.imageSmoothingQuality = "high";
			pen.drawImage(image, 0, 0, canvas.width, canvas.height);
			const copy = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.95));
			const bytes = new Uint8Array(await copy.arrayBuffer());
			const comment = new TextEncoder().encode(`ocelli ${width}x${height}`);
			const head = [0xff, 0xd8, 0xff, 0xfe, 0, comment.length + 2];
			const parts = [new Uint8Array(head), comment, bytes.subarray(2)];
			return new File(parts, file.name.replace(/\.\w+$/, "") + ".jpg", { type: "image/jpeg" });
		} catch (problem) {
			if (typeof problem == "string") {
				throw problem;
			}
			return file;
		} finally {
			URL.revokeObjectURL(url);
		}
	};
	// Browsers show what there is of a file that was cut off. The server says so, if it gets to see it.
	const endsEarly = async (file) => {
		const start = new Uint8Array(await file.slice(0, 2).arrayBuffer());
		const end = new Uint8Array(await file.slice(-65536).arrayBuffer());
		const holds = (...bytes) => end.some((_, at) => bytes.every((byte, next) => end[at + next] == byte));
		return start[0] == 0xff && start[1] == 0xd8 ? !holds(0xff, 0xd9)
			: start[0] == 0x89 && start[1] == 0x50 && !holds(0x49, 0x45, 0x4e, 0x44);
	};

	const upload = async (file) => {
		if (file.size > settings.bytes) {
			throw tooMuch(file, settings.bytes, "bytes", file.size);
		}
		await file.slice(0, 1).arrayBuffer().catch(() => {
			throw `'${file.name}': expected a file, got a folder, or a file that cannot be read`;
		});
		const copy = await smaller(file), body = new FormData();
		body.append("files", copy, copy.name || "image");
		const answer = await fetch("gradio_api/upload", { method: "POST", body });
		if (!answer.ok) {
			throw `'${file.name}': ${(await answer.json().catch(() => ({}))).detail ?? "the server refuses it"}`;
		}
		const [path] = await answer.json();
		const meta = { _type: "gradio.FileData" };
		return { path, orig_name: copy.name, size: copy.size, mime_type: copy.type || null, meta };
	};

	// Uploads files into a box, one after another, and hands them over: see web/parts.py.
	const take = (box, files, problems = []) => {
		if (files.length > settings.images) {
			problems.push(`Expected at most ${settings.images} images at once, got ${files.length}: the first are shown`);
			files = files.slice(0, settings.images);
		}
		readings += 1;
		document.body.classList.add("reading");
		reading = reading.then(async () => {
			const uploads = [];
			for (const file of files) {
				try {
					uploads.push(await upload(file));
				} catch (problem) {
					problems.push(typeof problem == "string" ? problem : `'${file.name}': it cannot be sent just now`);
				}
			}
			const over = new Promise((done) => arrived[box] = { uploads, problems, done });
			$(`#${box}-add`).click();
			await Promise.race([over, new Promise((done) => setTimeout(done, 60_000))]);
		}).finally(() => {
			readings -= 1;
			document.body.classList.toggle("reading", readings > 0);
		});
		return reading;
	};
	const ofVisitor = (files) => files.filter((file) => own.has(file.path));
	window.ocelli = {
		uploaded: (box, _files, _problems, message, ...rest) => {
			const { uploads, problems } = arrived[box];
			return [uploads, problems.join("\n"), { ...message, files: ofVisitor(message.files) }, ...rest];
		},
		join: (box, message, files) => {
			files = [files ?? []].flat();
			arrived[box]?.done();
			if (!files.length) {
				return message;
			}
			for (const file of files) {
				own.add(file.path);
			}
			kept((store) => store.ocelliImages = JSON.stringify([...own].slice(-200)));
			const before = ofVisitor(message.files);
			const asked = settings.examples.includes(message.text.trim()) && before.length < message.files.length;
			const text = asked ? settings.question : message.text;
			// Who types replaces the question that stands there now; where touching brings up a keyboard it waits.
			// Who has gone on to another field meanwhile stays there: a list that was opened would close.
			if (matchMedia("(pointer: fine)").matches) {
				setTimeout(() => {
					const place = $(`#${box}`), elsewhere = field(document.activeElement);
					if (elsewhere && !place.contains(elsewhere)) {
						return;
					}
					const question = place.querySelector("textarea");
					question.focus();
					asked && question.select();
				}, 50);
			}
			const shown = files.map((file) => ({ ...file, mime_type: file.mime_type ?? "image/jpeg" }));
			return { text, files: [...before, ...shown] };
		},
	};

	// They may be dropped and pasted anywhere, and nothing that is dropped takes the page's place.
	const box = () => ($("#where-message")?.offsetParent ? "where-message" : "message");
	const field = (target) => target instanceof Element && target.closest("textarea, input");
	let over;
	for (const kind of ["dragenter", "dragover"]) {
		document.addEventListener(kind, (event) => {
			const files = event.dataTransfer.types.includes("Files");
			if (files || !field(event.target)) {
				event.preventDefault();
				event.stopImmediatePropagation();
				if (files || !event.dataTransfer.types.includes("text/uri-list")) {  // a link's drop is answered below
					event.dataTransfer.dropEffect = files ? "copy" : "none";
				}
			}
			if (files) {
				document.body.classList.add("dropping");
				clearTimeout(over);
				over = setTimeout(() => document.body.classList.remove("dropping"), 300);
			}
		}, true);
	}
	document.addEventListener("drop", (event) => {
		document.body.classList.remove("dropping");
		const files = [...event.dataTransfer.files];
		if (!files.length && field(event.target)) {
			return;
		}
		event.preventDefault();
		event.stopImmediatePropagation();
		const link = event.dataTransfer.getData("text/uri-list");
		if (files.length || link) {
			take(box(), files, files.length ? [] : ["A link is not opened here: save the image, and drop its file"]);
		}
	}, true);
	document.addEventListener("paste", (event) => {
		const data = event.clipboardData, files = [...(data?.files ?? [])];
		// Text from a word processor comes with a picture of itself.
		const text = field(event.target) && data?.getData("text/plain") && data.getData("text/html");
		if (files.length && !text) {
			event.preventDefault();
			event.stopImmediatePropagation();
			take(box(), files);
		}
	}, true);
	document.addEventListener("change", (event) => {
		const input = event.target;
		if (input.type == "file" && input.closest("#message, #where-message")) {
			event.stopImmediatePropagation();
			take(input.closest("#message, #where-message").id, [...input.files]);
			input.value = "";
		}
	}, true);
	// A question that is sent while its images are being read waits for them.
	const send = (event) => {
		const place = event.target instanceof Element && event.target.closest("#message, #where-message");
		const sends = event.type == "click" ? event.target.closest?.(".submit-button")
			: event.key == "Enter" && !event.shiftKey && event.target.matches?.("textarea");
		if (readings && place && sends) {
			event.preventDefault();
			event.stopImmediatePropagation();
			reading.then(() => setTimeout(() => place.querySelector(".submit-button")?.click(), 50));
		}
	};
	for (const kind of ["click", "keypress"]) {
		document.addEventListener(kind, send, true);
	}
}
