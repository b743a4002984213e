for (const stepper of document.querySelectorAll(".cookbook-stepper:not([data-ready])")) {
  stepper.dataset.ready = "";
  const captions = [...stepper.querySelectorAll("ol > li")];
  const frames = stepper.querySelectorAll("svg .frame");
  const caption = document.createElement("p");
  caption.setAttribute("aria-live", "polite");
  caption.style.minHeight = "3em";
  const count = document.createElement("span");
  let at = 0;
  const show = (to) => {
    at = Math.max(0, Math.min(captions.length - 1, to));
    for (const part of frames) part.style.display = part.dataset.frame === String(at) ? "" : "none";
    caption.textContent = captions[at].textContent;
    count.textContent = ` ${at + 1} of ${captions.length} `;
    back.disabled = at === 0;
    next.disabled = at === captions.length - 1;
  };
  const button = (text, label, step) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.setAttribute("aria-label", label);
    made.style.cssText = "min-width:2.75rem;min-height:2.75rem;font-size:1.1rem;cursor:pointer";
    made.addEventListener("click", () => show(at + step));
    return made;
  };
  const back = button("\u2190", "Step back", -1);
  const next = button("\u2192", "Next step", 1);
  const keys = { ArrowLeft: () => at - 1, ArrowRight: () => at + 1, Home: () => 0, End: () => captions.length - 1 };
  stepper.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();  // JupyterLab would move to another cell.
    show(keys[event.key]());
  });
  const bar = document.createElement("div");
  bar.append(back, count, next);
  stepper.querySelector("ol").replaceWith(caption, bar);
  show(0);
}
