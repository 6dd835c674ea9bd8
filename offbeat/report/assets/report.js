/* The report's page: numbers and packed timelines in its own elements → charts, and a timeline with its controls. */
"use strict";

(() => {
  const at = (id) => document.getElementById(id);
  const numbers = JSON.parse(at("numbers").textContent);
  let view = null, other = null, chosen = -1;

  function drawSteps() {
    Charts.steps(at("step-columns"), {
      seconds: numbers.steps, parts: numbers.parts, rows: numbers.step_parts, chosen, onPick: chooseStep,
    });
  }

  function drawCharts() {
    Charts.legend(at("parts-legend"), numbers.parts);
    Charts.stacked(at("rank-bars"), { parts: numbers.parts, rows: numbers.ranks });
    drawSteps();
    if (at("what-ifs")) Charts.ranked(at("what-ifs"), { rows: numbers.what_ifs, base: numbers.base_seconds });
    Charts.legend(at("kinds-legend"), numbers.kinds, "kind");
    const path = Charts.element("span", "legend-entry");
    path.append(Charts.element("span", "swatch outline"), Charts.element("span", "", "critical path"));
    at("kinds-legend").append(path);
  }

  function chooseStep(number) {
    if (!view) return;
    const step = view.scene.steps[number];
    chosen = step ? number : -1;
    at("step").value = String(chosen);
    if (step) {
      const margin = 0.02 * (step[1] - step[0]);
      view.show(step[0] - margin, step[1] + margin);
    } else view.fit();
    drawSteps();
  }

  function fillSteps() {
    const options = view.scene.steps.map((step, number) =>
      Charts.element("option", "", `${number} (${Charts.seconds(step[1] - step[0])})`, { value: String(number) }));
    at("step").replaceChildren(Charts.element("option", "", "all", { value: "-1" }), ...options);
  }

  function showWindow(start, end) {
    const step = view.scene.steps[chosen];
    if (step && (start > step[1] || end < step[0] || end - start > 1.2 * (step[1] - step[0]))) {
      chosen = -1;
      at("step").value = "-1";
      drawSteps();
    }
    at("window").textContent = `${Charts.seconds(end - start)} shown, from ${Charts.seconds(start)}`;
    if (other) showOther(start, end);
  }

  // The other recording shows as much as this one, counted from the beginning of the step that is shown here.
  function showOther(start, end) {
    const { steps } = view.scene, found = steps.findIndex((step) => step[1] > start);
    const number = chosen >= 0 ? chosen : Math.max(found, 0);
    // Its last step but one at most: a longer step here shows what follows there.
    const there = other.scene.steps[Math.max(Math.min(number, other.scene.steps.length - 2), 0)][0];
    other.show(there + start - steps[number][0], there + end - steps[number][0]);
  }

  const decoded = new Map();
  async function sceneOf(number) {
    const element = document.querySelectorAll("script.scene")[number];
    if (!decoded.has(number)) decoded.set(number, await Timeline.decode(element.textContent));
    return decoded.get(number);
  }

  async function chooseScene(number) {
    view.setScene(await sceneOf(number));
    chosen = -1;
    fillSteps();
    drawSteps();
    for (const button of document.querySelectorAll("[data-scene]"))
      button.setAttribute("aria-pressed", String(Number(button.dataset.scene) === number));
  }

  function connect() {
    at("zoom-in").addEventListener("click", () => view.zoom(0.5));
    at("zoom-out").addEventListener("click", () => view.zoom(2));
    at("zoom-fit").addEventListener("click", () => chooseStep(-1));
    at("step").addEventListener("change", (event) => chooseStep(Number(event.target.value)));
    at("critical").addEventListener("click", () => view.toggleCritical());
    at("timeline").addEventListener("critical", (event) => at("critical").setAttribute("aria-pressed", String(event.detail)));
    for (const button of document.querySelectorAll("[data-scene]"))
      button.addEventListener("click", () => chooseScene(Number(button.dataset.scene)));
  }

  Charts.switchTheme(at("theme"));
  Charts.copyButtons();

  async function begin() {
    drawCharts();
    const scene = await sceneOf(0);
    view = Timeline.create(at("timeline"), scene);
    window.timelineView = view;
    if (at("other-scene")) {
      other = Timeline.create(at("other-timeline"), await Timeline.decode(at("other-scene").textContent));
      window.otherView = other;
    }
    view.onWindow = showWindow;
    showWindow(view.start, view.end);
    fillSteps();
    connect();
    // Of a long trace one step tells more than all of them at once.
    if (scene.steps.length > 1) chooseStep(scene.steps.length - 1);
    document.body.dataset.readyMilliseconds = String(Math.round(performance.now()));
  }

  begin().catch((error) => {
    at("timeline").textContent = `The timeline could not be drawn: ${error.message}`;
    throw error;
  });
})();
