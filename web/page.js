"use strict";
// The page is a client of /v1/chat/completions. A conversation with its pictures lives in this browser
// (IndexedDB), one for each tab; what is asked goes to this server, or to the one that the settings name.

const EXAMPLES = [
	["example.png", "Coloured shapes, a printed word and a digit", "What colour is the star?", "How many shapes are there?", "What word do you see?"],
	["three.png", "Three shapes", "Describe the picture.", "Is there a circle?", "What is on the left?"],
	["cup.png", "A printed word", "What is the printed word?", "What is in the picture?"],
	["wolf.png", "Shapes with a word", "Describe the picture.", "How many shapes are there?"],
];
const OWN = ["What is in the picture?", "Describe the picture.", "How many objects are there?"]; // of a visitor's picture
const LONGEST_SIDE = 2048; // pixels of a picture that is sent
const MOST_BYTES = 20 * 2 ** 20; // of a file
const KEPT_DAYS = 30;
const KEPT_SETTINGS = ["temperature", "tokens", "remember", "think", "server"];

const $ = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
	const made = Object.assign(document.createElement(tag), properties);
	made.append(...children);
	return made;
};
const svg = (tag, attributes) => {
	const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
	for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
	return made;
};
const newKey = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (one) => one.toString(16).padStart(2, "0")).join("");

let model = "", about = { questions: {} };
let turns = []; // {images, question, asked (in the model's words), text, thought, boxes, points, figures, ended, where}
let files = []; // pictures of the next question: {blob, name, video, width, height}
let example = 0, running = null, key = "", kept = false; // kept: settings of this tab

// ------------------------------------------------------------------------------------------------ the server
const address = (path) => $("server").value.trim().replace(/\/+(v1\/*)?$/, "") + path;

async function send(path, body, signal) {
	const headers = { "content-type": "application/json" };
	if ($("key").value) headers.authorization = `Bearer ${$("key").value}`;
	let answer;
	try {
		answer = await fetch(address(path), { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
	} catch (error) {
		if (error.name === "AbortError") throw error;
		throw new Error("The server cannot be reached: try again in a moment.");
	}
	if (answer.ok) return answer;
	const said = await answer.json().catch(() => ({}));
	const more = answer.status === 401 ? " (Settings have a field for it.)" : "";
	throw new Error((said.error?.message ?? `The server answered with status ${answer.status}.`) + more);
}

async function connect() {
	try {
		const [first] = (await (await send("/v1/models")).json()).data;
		model = first.id;
		about = { questions: {}, ...first.ocelli };
		if (!turns.length && !kept) $("remember").checked = !about.single_turn;
		$("about").textContent = $("about").title = about.introduction || model;
		$("can-think").hidden = !about.thinks;
		$("card").hidden = !($("card").href = about.card ?? "");
		for (const button of document.querySelectorAll(".quick [data-kind]"))
			button.hidden = ["detect", "point"].includes(button.dataset.kind) && !about.questions[button.dataset.kind];
		say("");
	} catch (error) {
		say(error.message);
	}
}

async function* events(answer) {
	const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
	for (let rest = ""; ;) {
		const { value, done } = await reader.read();
		if (done) return;
		const pieces = (rest + value).split("\n\n");
		rest = pieces.pop();
		for (const piece of pieces)
			for (const line of piece.split("\n"))
				if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
	}
}

const dataUrl = (blob) => new Promise((done, failed) => {
	const reader = new FileReader();
	reader.onload = () => done(reader.result);
	reader.onerror = () => failed(reader.error);
	reader.readAsDataURL(blob);
});

async function userMessage(images, question) {
	const parts = await Promise.all(images.map(async ({ blob, video }) => {
		const kind = video ? "video_url" : "image_url";
		return { type: kind, [kind]: { url: await dataUrl(blob) } };
	}));
	return { role: "user", content: [...parts, { type: "text", text: question }] };
}

// Pictures that a question is about: its own, or else those that were shown last.
const imagesOf = (turn) => turns.slice(0, turns.indexOf(turn) + 1).findLast((one) => one.images.length)?.images ?? [];

async function messagesOf(turn) {
	if (!$("remember").checked) return [await userMessage(imagesOf(turn), turn.asked)];
	// A new picture begins anew: earlier ones would be counted among those that are asked about.
	const before = turns.slice(0, turns.indexOf(turn) + 1), said = [];
	for (const one of before.slice(Math.max(0, before.findLastIndex((one) => one.images.length)))) {
		said.push(await userMessage(one.images, one.asked));
		if (one !== turn) said.push({ role: "assistant", content: one.text });
	}
	return said;
}

async function ask(question, asked = question) {
	if (running || !question.trim()) return;
	const stop = running = new AbortController();
	await adding; // pictures that were chosen just before
	const taken = files;
	let images = taken;
	try {
		if (!taken.length && !turns.length) images = [await exampleImage()];
	} catch {
		running = null;
		return say("The server cannot be reached: try again in a moment.");
	}
	const turn = { images, question: question.trim(), asked: asked.trim(), text: "", thought: "" };
	files = [];
	turns.push(turn);
	$("question").value = "";
	say("");
	show();
	save();
	turn.node.scrollIntoView({ block: "end" });
	busy(true);
	const began = performance.now(), logs = [];
	try {
		const body = {
			model, messages: await messagesOf(turn), stream: true, stream_options: { include_usage: true }, logprobs: true,
			temperature: Number($("temperature").value), max_tokens: Number($("tokens").value) || 512,
		};
		if ($("seed").value) body.seed = Number($("seed").value);
		if (about.thinks) body.chat_template_kwargs = { enable_thinking: $("think").checked };
		turn.figures = {};
		for await (const chunk of events(await send("/v1/chat/completions", body, stop.signal))) {
			if (chunk.error) throw new Error(chunk.error.message);
			if (chunk.usage) turn.figures.usage = chunk.usage;
			for (const { delta, finish_reason, logprobs } of chunk.choices ?? []) {
				turn.text += delta.content ?? "";
				turn.thought += delta.reasoning_content ?? "";
				turn.ended = finish_reason ?? turn.ended;
				if (delta.boxes || delta.points) Object.assign(turn, { boxes: delta.boxes, points: delta.points });
				if (logprobs) logs.push(...logprobs.content.map((one) => one.logprob));
				if (delta.content || delta.reasoning_content) turn.figures.first ??= (performance.now() - began) / 1000;
			}
			showAnswer(turn);
		}
	} catch (error) {
		turn.ended = "stopped";
		if (error.name !== "AbortError") say(error.message);
		if (!turn.text) { // the question comes back
			turns = turns.filter((one) => one !== turn);
			files = [...taken, ...files];
			$("question").value ||= question;
		}
	}
	running = null;
	turn.figures = { ...turn.figures, seconds: (performance.now() - began) / 1000 };
	if (logs.length) turn.figures.sure = Math.exp(logs.reduce((sum, one) => sum + one, 0) / logs.length);
	busy(false);
	show();
	turns.at(-1)?.answer.scrollIntoView({ block: "end" });
	save();
}

async function whereItLooked(turn, button) {
	button.disabled = true;
	button.textContent = "Looking …";
	try {
		const body = { model, messages: [await userMessage(imagesOf(turn), turn.asked)] };
		const found = await (await send("/v1/attribution", body)).json();
		turn.where = found.image;
		if (found.answer.trim() !== turn.text.trim()) say("The map is of this question asked alone, without sampling.");
		save();
	} catch (error) {
		say(error.message);
	}
	showAnswer(turn);
}

// -------------------------------------------------------------------------------------------------- pictures
async function exampleImage() {
	const name = EXAMPLES[example][0];
	return read(new File([await (await fetch(`/page/${name}`)).blob()], name, { type: "image/png" }));
}

// A file as it will be sent; large pictures are made smaller. Throws with a sentence about what cannot be shown.
async function read(file) {
	const video = file.type.startsWith("video/");
	if (video && !about.videos) throw new Error(`${file.name}: this model takes no videos`);
	if (video && file.size > MOST_BYTES) throw new Error(`${file.name}: expected at most 20 MB, got ${Math.ceil(file.size / 2 ** 20)}`);
	if (video) return { blob: file, name: file.name, video };
	let bitmap;
	try {
		bitmap = await createImageBitmap(file);
	} catch {
		throw new Error(`${file.name || "this"}: expected a picture that this browser can show`);
	}
	const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
	const width = Math.max(1, Math.round(bitmap.width * scale)), height = Math.max(1, Math.round(bitmap.height * scale));
	let blob = file;
	if (scale < 1 || file.size > MOST_BYTES / 4 || !/png|jpeg|webp|gif/.test(file.type)) {
		const canvas = make("canvas", { width, height });
		const pen = canvas.getContext("2d");
		pen.fillStyle = "#fff";
		pen.fillRect(0, 0, width, height);
		pen.drawImage(bitmap, 0, 0, width, height);
		blob = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.93));
	}
	return { blob, name: file.name, width, height };
}

let adding = Promise.resolve();
const add = (list) => (adding = adding.then(() => addAll(list)));

async function addAll(list) {
	const wrong = [];
	for (const file of list) {
		try {
			const image = await read(file);
			files.push(image);
		} catch (error) {
			wrong.push(error.message);
		}
	}
	const few = about.images && files.length > about.images;
	say(wrong.length ? wrong.join(". ") : few ? `This model has learned from ${about.images} at a time.` : "");
	show();
	$("question").focus();
}

const urlOf = (image) => (image.url ??= URL.createObjectURL(image.blob));
const visual = (image, alt) => image.video
	? make("video", { src: urlOf(image), controls: true, muted: true, ariaLabel: alt })
	: make("img", { src: urlOf(image), alt });

// --------------------------------------------------------------------------------------------------- showing
function say(text) {
	$("notice").textContent = text;
}

function busy(now) {
	$("send").hidden = now;
	$("stop").hidden = !now;
	for (const button of document.querySelectorAll(".quick button, #chips button, .under button")) button.disabled = now;
	buttons();
}

function buttons() {
	$("undo").disabled = !turns.length || running !== null;
	$("clear").disabled = !(turns.length || files.length || $("question").value) || running !== null;
}

function show() {
	for (const turn of turns) turn.node ??= nodeOf(turn);
	$("talk").replaceChildren(...turns.map((turn) => turn.node));
	turns.forEach(showAnswer);
	$("files").replaceChildren(...files.map((image, number) => {
		const away = make("button", { type: "button", textContent: "×", ariaLabel: `Remove picture ${number + 1}, ${image.name}` });
		away.onclick = () => { files.splice(number, 1); show(); };
		const label = files.length > 1 ? [make("span", { className: "number", textContent: number + 1 })] : [];
		return make("div", { role: "listitem" }, visual(image, image.name), ...label, away);
	}));
	$("start").hidden = turns.length > 0;
	if (!turns.length) showStart();
	buttons();
}

function showStart() {
	const [name, alt, ...questions] = EXAMPLES[example], own = files.find((one) => !one.video);
	$("shown").src = own ? urlOf(own) : `/page/${name}`;
	$("shown").alt = own ? own.name : alt;
	const chip = (text) => make("button", { type: "button", textContent: text, onclick: () => ask(text) });
	$("chips").replaceChildren(...(files.length ? OWN : questions).map(chip));
	$("examples").hidden = files.length > 0;
	$("examples").replaceChildren(...EXAMPLES.map(([file, about], number) => make("button", {
		type: "button", ariaPressed: number === example, ariaLabel: `Example: ${about}`, onclick: () => { example = number; showStart(); },
	}, make("img", { src: `/page/${file}`, alt: "" }))));
}

function nodeOf(turn) {
	const stages = turn.images.map((image, number) => {
		const label = turn.images.length > 1 ? [make("span", { className: "number", textContent: number + 1 })] : [];
		return make("div", { className: "stage" }, visual(image, image.name), ...label);
	});
	turn.stage = stages.length === 1 && !turn.images[0].video ? stages[0] : null;
	turn.answer = make("div", { className: "answer" });
	const shown = make("div", { className: stages.length > 1 ? "shown several" : "shown" }, ...stages);
	return make("article", {}, ...(stages.length ? [shown] : []), make("p", { className: "mine", textContent: turn.question }), turn.answer);
}

function showAnswer(turn) {
	const parts = [];
	if (turn.thought) parts.push(make("details", {}, make("summary", { textContent: "Thinking" }), make("pre", { textContent: turn.thought.trim() })));
	if (turn.boxes?.length || turn.points?.length) parts.push(...located(turn));
	parts.push(make("p", { className: "text", textContent: inWords(turn) }));
	if (turn.ended) parts.push(under(turn));
	if (turn.where) parts.push(make("img", { className: "where", src: turn.where, alt: "Where the model looked for each word of its answer" }));
	turn.answer.replaceChildren(...parts);
}

// A list of places in words: a person sees them on the picture.
function inWords(turn) {
	const found = [...(turn.boxes ?? []), ...(turn.points ?? [])], isList = /^\s*(\[|```)/.test(turn.text);
	if (turn.ended !== "stop" || !isList || !turn.boxes) return turn.text;
	const counts = new Map();
	for (const { label } of found) counts.set(label ?? "", (counts.get(label ?? "") ?? 0) + 1);
	return found.length ? [...counts].map(([label, count]) => `${count} × ${label || "found"}`).join(", ") : "None found.";
}

// What an answer locates, over the picture: that of its turn, or a copy of the one before.
function located(turn) {
	const [image] = imagesOf(turn);
	if (!image || image.video || imagesOf(turn).length > 1) return [];
	const { width, height } = image, size = Math.max(width, height) / 34;
	const over = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
	const name = (text, x, y) => {
		const label = svg("text", { x: Math.max(0, Math.min(x, width - size)), y: Math.max(size, y), "font-size": size });
		label.textContent = text ?? "";
		return label;
	};
	for (const { box, label } of (turn.boxes ?? []).filter((one) => one.box)) {
		const [x, y, right, bottom] = box;
		over.append(svg("rect", { x, y, width: right - x, height: bottom - y, rx: 2 }), name(label, x, y - size / 4));
	}
	for (const { point, label } of (turn.points ?? []).filter((one) => one.point))
		over.append(svg("circle", { cx: point[0], cy: point[1], r: size / 2.2 }), name(label, point[0] + size, point[1]));
	turn.stage?.querySelector("svg")?.remove();
	if (turn.stage) {
		turn.stage.append(over);
		return [];
	}
	return [make("div", { className: "shown" }, make("div", { className: "stage" }, visual(image, image.name), over))];
}

function under(turn) {
	const { seconds, first, sure, usage } = turn.figures ?? {}, line = make("div", { className: "under" });
	const ended = { length: "cut at the longest answer", stopped: "stopped" }[turn.ended];
	const said = [seconds && `${seconds.toFixed(1)} s`, sure && `sure at ${Math.round(sure * 100)} %`, ended].filter(Boolean).join(", ");
	const figures = make("details", { className: "figures" }, make("summary", { textContent: said || "figures" }));
	if (inWords(turn) !== turn.text) figures.append(make("pre", { textContent: turn.text }));
	if (usage) {
		const kept = usage.prompt_tokens_details?.cached_tokens ?? 0, speed = (usage.completion_tokens - 1) / (seconds - first);
		figures.append(` first words after ${first?.toFixed(2) ?? "?"} s; ${usage.completion_tokens} tokens`
			+ (speed > 0 && isFinite(speed) ? `, ${speed.toFixed(0)} a second` : "") + `; question of ${usage.prompt_tokens} positions, ${kept} of them kept; ${model}`);
	}
	const button = (text, act) => make("button", { type: "button", textContent: text, onclick: act, disabled: running !== null });
	line.append(figures, button("Copy", () => navigator.clipboard?.writeText(turn.text)));
	if (imagesOf(turn).length && !turn.where && !imagesOf(turn).some((one) => one.video)) {
		const where = button("Where did it look?", () => whereItLooked(turn, where));
		line.append(where);
	}
	return line;
}

// ------------------------------------------------------------------------------------------- what is clicked
function undo() {
	const turn = turns.pop();
	files = [...turn.images, ...files];
	$("question").value ||= turn.question;
	say("");
	show();
	save();
}

function clear() {
	turns = [];
	files = [];
	$("question").value = "";
	say("");
	show();
	save();
	$("question").focus();
}

function quick(kind) {
	const thing = $("question").value.trim();
	if (kind === "describe") return ask("Describe the picture.");
	if (kind === "count") return ask(`How many ${thing || "objects"} are there?`);
	const verb = kind === "point" ? "Point to" : "Find";
	if (thing) return ask(`${verb} ${thing}`, about.questions[kind]?.replaceAll("{thing}", () => thing));
	say(`${verb} what? Type its name, then press the button again.`);
	$("question").focus();
}

// ------------------------------------------------------------------------------------------ what stays here
const database = new Promise((done) => {
	const opening = indexedDB.open("ocelli", 1);
	opening.onupgradeneeded = () => opening.result.createObjectStore("talks", { keyPath: "id" });
	opening.onsuccess = () => done(opening.result);
	opening.onerror = () => done(null); // a browser that keeps nothing
}).catch(() => null);

async function save() {
	const settings = Object.fromEntries(KEPT_SETTINGS.map((id) => [id, $(id).type === "checkbox" ? $(id).checked : $(id).value]));
	const plain = turns.map(({ node, answer, stage, images, ...turn }) => ({ ...turn, images: images.map(({ url, ...image }) => image) }));
	(await database)?.transaction("talks", "readwrite").objectStore("talks").put({ id: key, at: Date.now(), turns: plain, settings });
}

async function restore() {
	try {
		key = sessionStorage.ocelli ??= newKey();
	} catch {
		key = newKey();
	}
	const talks = (await database)?.transaction("talks", "readwrite").objectStore("talks");
	if (!talks) return;
	const all = await new Promise((done) => { const found = talks.getAll(); found.onsuccess = () => done(found.result); found.onerror = () => done([]); });
	for (const talk of all) if (talk.at < Date.now() - KEPT_DAYS * 86_400_000) talks.delete(talk.id);
	const mine = all.find((talk) => talk.id === key);
	turns = mine?.turns ?? [];
	for (const turn of turns) turn.ended ??= "stopped"; // the page was closed while it was answered
	for (const [id, value] of Object.entries(mine?.settings ?? {})) $(id)[typeof value === "boolean" ? "checked" : "value"] = value;
	return mine;
}

// ---------------------------------------------------------------------------------------------------- events
$("ask").onsubmit = (event) => { event.preventDefault(); ask($("question").value || (turns.length ? "" : OWN[0])); };
$("question").onkeydown = (event) => {
	if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
};
$("question").oninput = buttons;
$("stop").onclick = () => running?.abort();
$("undo").onclick = undo;
$("clear").onclick = clear;
$("choose").onchange = () => { add([...$("choose").files]); $("choose").value = ""; };
$("temperature").oninput = () => { $("warm").value = $("temperature").value; };
$("server").onchange = $("key").onchange = connect;
$("settings").onchange = save;
for (const button of document.querySelectorAll(".quick [data-kind]")) button.onclick = () => quick(button.dataset.kind);
document.onkeydown = (event) => {
	if (event.key !== "Escape") return;
	running?.abort();
	$("settings").open = false;
};
document.onclick = (event) => { if (!$("settings").contains(event.target)) $("settings").open = false; };
document.onpaste = (event) => {
	const pasted = [...event.clipboardData.files];
	if (pasted.length && !event.clipboardData.getData("text/plain")) { event.preventDefault(); add(pasted); }
};
document.ondragover = (event) => {
	if (!event.dataTransfer.types.includes("Files")) return;
	event.preventDefault();
	$("drop").hidden = false;
};
document.ondragleave = (event) => { if (!event.relatedTarget) $("drop").hidden = true; };
document.ondrop = (event) => {
	$("drop").hidden = true;
	if (!event.dataTransfer.files.length) return;
	event.preventDefault();
	add([...event.dataTransfer.files]);
};

(async () => {
	kept = Boolean((await restore())?.settings);
	$("warm").value = $("temperature").value;
	show();
	await connect();
})();
