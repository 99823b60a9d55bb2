"use strict";
(() => {
  const root = document.documentElement;
  const $ = (selector, within) => (within || document).querySelector(selector);
  const all = (selector, within) => Array.from((within || document).querySelectorAll(selector));
  const store = {
    get() { try { return localStorage.getItem("posattn-theme"); } catch { return null; } },
    set(value) { try { value ? localStorage.setItem("posattn-theme", value) : localStorage.removeItem("posattn-theme"); } catch { /* private window */ } },
  };

  /* ---- theme ---- */
  const themes = ["", "light", "dark"];
  const themeButton = $("#theme");
  function setTheme(theme) {
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    themeButton.textContent = "Colours: " + (theme || "system");
    themeButton.setAttribute("aria-label", "Colours: " + (theme || "as the system has them"));
    drawn.forEach((chart) => chart.draw());
  }

  /* ---- charts ---- */
  const colour = (token) => getComputedStyle(root).getPropertyValue("--" + token).trim();
  const scale = () => ["h0", "h1", "h2", "h3", "h4", "h5"].map((name, index) => [index / 5, colour(name)]);
  const diverging = () => [[0, colour("c0")], [0.5, colour("card")], [1, colour("mark")]];

  /* layers as colours that stand off the paper, first to last */
  const layerScale = () => ["c4", "c0", "c6", "c3", "c1"].map((name, index) => [index / 4, colour(name)]);

  /* colour tokens (`@c0`) become this theme's colours; packed grids become numbers */
  function resolve(value) {
    if (typeof value === "string") {
      if (value === "@sequential") return scale();
      if (value === "@layers") return layerScale();
      if (value === "@diverging") return diverging();
      return /^@[a-z]+[0-9]?$/.test(value) ? colour(value.slice(1)) || value : value;
    }
    if (Array.isArray(value)) return typeof value[0] === "number" && typeof value[value.length - 1] !== "string" ? value : value.map(resolve);
    if (value && typeof value === "object") {
      if (value.packed) return unpack(value);
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item)]));
    }
    return value;
  }

  function unpack({ packed, rows, columns, low, high }) {
    const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
    const grid = [];
    for (let i = 0; i < rows; i++) {
      grid.push(Array.from(bytes.subarray(i * columns, (i + 1) * columns), (byte) => (byte === 255 ? null : low + ((high - low) * byte) / 254)));
    }
    return grid;
  }

  function merge(into, from) {
    for (const [key, value] of Object.entries(from || {})) {
      if (value && typeof value === "object" && !Array.isArray(value) && into[key] && typeof into[key] === "object") merge(into[key], value);
      else into[key] = value;
    }
    return into;
  }

  function baseLayout(width) {
    const axis = { gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("line"), automargin: true, title: { standoff: 10, font: { size: 13, color: colour("soft") } }, tickfont: { size: 12 } };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("ink") },
      margin: { l: 10, r: 12, t: 8, b: width < 500 ? 44 : 8 }, xaxis: structuredClone(axis), yaxis: structuredClone(axis), hovermode: "x unified",
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, xanchor: "left", font: { size: width < 500 ? 11 : 13 }, bgcolor: "rgba(0,0,0,0)" },
      /* Plotly's own choice, half of a transparent paper, is a grey box over the legend */
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("ink") },
      showlegend: true, dragmode: width < 500 ? false : "zoom",
    };
  }

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.plot = $(".plot", figure);
      this.data = JSON.parse($(".chart-data", figure).textContent);
      this.log = this.data.logFirst;
      this.choice = [];
      all("[data-control]", figure).forEach((element) => {
        const index = Number(element.dataset.control);
        if (element.tagName === "SELECT") {
          this.choice[index] = element.value;
          element.addEventListener("change", () => { this.choice[index] = element.value; this.draw(); });
        } else {
          if (element.getAttribute("aria-pressed") === "true") this.choice[index] = element.dataset.option;
          element.addEventListener("click", () => {
            all(`[data-control="${index}"]`, figure).forEach((other) => other.setAttribute("aria-pressed", String(other === element)));
            this.choice[index] = element.dataset.option;
            this.draw();
          });
        }
      });
      const toggle = $("[data-log]", figure);
      if (toggle) toggle.addEventListener("click", () => { this.log = !this.log; toggle.setAttribute("aria-pressed", String(this.log)); this.draw(); });
      $("[data-copy]", figure).addEventListener("click", () => copy(this.table(), "Data of the figure copied"));
    }
    get view() {
      const chosen = this.data.views[this.choice.join("|")] || Object.values(this.data.views)[0];
      const base = this.data.base;
      if (!base.traces && !base.layout) return chosen;
      return {
        traces: chosen.traces.map((trace, index) => ({ ...((base.traces || [])[index] || {}), ...trace })),
        layout: merge(structuredClone(base.layout || {}), structuredClone(chosen.layout || {})),
      };
    }
    choose(choice) { this.choice = choice; if (this.figure.dataset.drawn) this.draw(); }
    draw() {
      const width = this.plot.clientWidth;
      if (!width) return;
      const view = resolve(this.view);
      const layout = merge(baseLayout(width), structuredClone(view.layout || {}));
      layout.height = this.data.square ? Math.min(width, 620) : this.data.height;
      layout.width = width;
      if (this.data.log) layout[this.data.log + "axis"].type = this.log ? "log" : "linear";
      if (this.log && this.data.log) {
        const axis = layout[this.data.log + "axis"], logTicks = [];
        delete axis.rangemode;
        for (let power = -14; power <= 6; power++) [1, 2, 5].forEach((digit) => logTicks.push(Number(`${digit}e${power}`)));
        const values = view.traces.filter((trace) => trace.meta !== "band" && trace.visible !== "legendonly").flatMap((trace) => trace[this.data.log]).filter((value) => value > 0);
        const decades = Math.log10(Math.max(...values) / Math.min(...values));
        axis.tickvals = decades > 2 ? logTicks.filter((_, index) => index % 3 === 0) : logTicks;
        /* a curve that collapses would squeeze all others flat: at most four decades below the top */
        if (decades > 4) axis.range = [Math.log10(Math.max(...values)) - 4, Math.log10(Math.max(...values)) + 0.15];
      }
      /* few whole numbers (layers, heads, positions) have no halves between them */
      ["x", "y"].forEach((name) => {
        const axis = layout[name + "axis"];
        /* steps made for a wide page */
        if (width < 500 && name === "x" && axis.dtick && axis.range) axis.dtick *= Math.ceil((axis.range[1] - axis.range[0]) / axis.dtick / 8);
        if (axis.dtick || axis.tickvals || axis.type === "log") return;
        const places = view.traces.filter((trace) => name === "x" || trace.type === "heatmap").flatMap((trace) => Array.from(trace[name] || []));
        if (places.length && places.every(Number.isInteger) && Math.max(...places) - Math.min(...places) <= 8) Object.assign(axis, { tick0: 0, dtick: 1 });
      });
      view.traces.forEach((trace) => { if (trace.power) { trace.customdata = trace.z.map((row) => row.map((cell) => (cell === null ? null : 10 ** cell))); delete trace.power; } });
      if (width < 500) view.traces.forEach((trace) => { 
        const bar = trace.colorbar || (trace.marker && trace.marker.colorbar);
        /* above the chart, where there is room */
        if (bar) Object.assign(bar, { orientation: "h", thickness: 8, x: 0.5, y: 1.02, yanchor: "bottom", len: 0.9, tickfont: { size: 10 }, title: { ...bar.title, side: "top", font: { size: 11 } } });
      });
      /* a long legend on a narrow page: two to a row where the names are short enough, else a taller chart */
      const named = view.traces.filter((trace) => trace.showlegend !== false && trace.name);
      if (width < 500 && layout.showlegend && named.length > 4) {
        if (Math.max(...named.map((trace) => trace.name.length)) <= 18) Object.assign(layout.legend, { entrywidth: 0.49, entrywidthmode: "fraction", font: { size: 10 } });
        else layout.height += 14 * (named.length - 4);
      }
      /* a scale above the chart shrinks it after the axis' title was placed, which would then stand among the ticks */
      if (width < 500 && view.traces.some((trace) => trace.colorbar) && layout.xaxis.title) layout.xaxis.title.standoff = 24;
      /* the colours' scale is up there already: the legend goes below the axis */
      const scaled = view.traces.some((trace) => trace.type !== "heatmap" && trace.marker && trace.marker.showscale);
      if (width < 500 && scaled) Object.assign(layout.legend, { y: -0.24, yanchor: "top" });
      window.Plotly.react(this.plot, view.traces, layout, { displaylogo: false, showSendToCloud: false, responsive: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], displayModeBar: width >= 500 ? "hover" : false })
        .then(() => { this.figure.dataset.drawn = "true"; });
      if (!this.listening && this.plot.on) {
        this.listening = true;
        this.plot.on("plotly_click", (event) => {
          const point = event.points[0];
          const anchor = Array.isArray(point.customdata) ? point.customdata[0] : point.customdata;
          if (typeof anchor === "string" && anchor.startsWith("#")) go(anchor);
        });
      }
    }
    table() {
      const view = resolve(this.view), lines = [];
      view.traces.forEach((trace) => {
        if (trace.meta === "band") return;
        if (trace.type !== "heatmap" && trace.y.every((value) => value === null)) return; /* stands in the legend only */
        if (trace.type === "heatmap") {
          lines.push(["y \\ x", ...(trace.x || trace.z[0].map((_, index) => index))].join("\t"));
          const cells = trace.power ? trace.z.map((row) => row.map((cell) => (cell === null ? "" : 10 ** cell))) : trace.z;
          cells.forEach((row, index) => lines.push([trace.y ? trace.y[index] : index, ...row].join("\t")));
        } else {
          lines.push(["x", trace.name || "y"].join("\t"));
          (trace.x || trace.y.map((_, index) => index)).forEach((x, index) => lines.push([x, trace.y[index]].join("\t")));
        }
        lines.push("");
      });
      return lines.join("\n");
    }
  }

  const drawn = [];
  const byId = new Map();
  function drawVisible(within) {
    all("figure.chart", within).forEach((figure) => {
      if (figure.closest("details:not([open])")) return;
      if (byId.has(figure.id)) { if (figure.dataset.drawn) byId.get(figure.id).draw(); return; }
      const chart = new Chart(figure);
      byId.set(figure.id, chart);
      drawn.push(chart);
      waiting.push(chart);
    });
    drawNext();
  }
  /* one chart at a time, so that the page can be read and used while the rest is drawn */
  const waiting = [];
  function drawNext() {
    const chart = waiting.shift();
    if (!chart) return;
    chart.draw();
    setTimeout(drawNext);
  }

  /* ---- groups: one choice for several charts ---- */
  const groups = new Map();
  all("[data-group]").forEach((element) => {
    const facts = JSON.parse($(".group-data", element).textContent);
    const selects = all("select[data-control]", $(".controls", element));
    const list = $("dl", element);
    const show = () => {
      const choice = selects.map((select) => select.value);
      list.replaceChildren(...(facts[choice.join("|")] || []).map(([name, value]) => {
        const row = document.createElement("div"), term = document.createElement("dt"), detail = document.createElement("dd");
        term.textContent = name;
        detail.textContent = value;
        row.append(term, detail);
        return row;
      }));
      all("figure.chart", element).forEach((figure) => { const chart = byId.get(figure.id); if (chart) chart.choose(choice); });
      return choice;
    };
    const step = (by) => {
      /* the last choice runs fastest; running over its end moves the one before it */
      for (let i = selects.length - 1, carry = by; i >= 0 && carry; i--) {
        const next = selects[i].selectedIndex + carry, count = selects[i].options.length;
        selects[i].selectedIndex = (next + count) % count;
        carry = next < 0 ? -1 : next >= count ? 1 : 0;
      }
      show();
    };
    selects.forEach((select) => select.addEventListener("change", show));
    all("[data-step]", element).forEach((button) => button.addEventListener("click", () => step(Number(button.dataset.step))));
    groups.set(element.id, {
      element, show,
      set(choice) { selects.forEach((select, index) => { select.value = choice[index]; }); show(); },
    });
  });

  /* ---- copy ---- */
  let toastTimer;
  function say(message) {
    const toast = $("#toast");
    toast.textContent = message;
    toast.classList.add("shown");
    clearTimeout(toastTimer);
    toastTimer = setTimeout(() => toast.classList.remove("shown"), 1600);
  }
  async function copy(text, message) {
    try { await navigator.clipboard.writeText(text); } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    say(message);
  }

  /* ---- tables ---- */
  function key(cell) {
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    const text = cell.textContent.trim();
    return text === "–" ? null : text;
  }
  all("[data-table]").forEach((block) => {
    const body = $("tbody", block), rows = Array.from(body.rows);
    all("[data-sort]", block).forEach((button, index) => button.addEventListener("click", () => {
      const heading = button.closest("th");
      const up = heading.getAttribute("aria-sort") !== "ascending";
      all("th[aria-sort]", block).forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      rows.sort((a, b) => {
        const left = key(a.cells[index]), right = key(b.cells[index]);
        if (left === null || right === null) return (left === null) - (right === null);
        const order = typeof left === "number" && typeof right === "number" ? left - right : String(left).localeCompare(String(right), undefined, { numeric: true });
        return up ? order : -order;
      });
      body.append(...rows);
    }));
    const filter = $("[data-filter]", block);
    if (filter) {
      const count = $(".count", block);
      const apply = () => {
        const wanted = filter.value.toLowerCase().trim();
        let shown = 0;
        rows.forEach((row) => {
          row.hidden = !row.textContent.toLowerCase().replace(/\s+/g, " ").includes(wanted);
          if (!row.hidden) shown += 1;
        });
        count.textContent = shown === rows.length ? `${rows.length} rows` : `${shown} of ${rows.length} rows`;
      };
      filter.addEventListener("input", apply);
      apply();
    }
    $("[data-copy]", block).addEventListener("click", () => {
      const text = (cell) => (cell.dataset.value !== undefined ? cell.dataset.value : cell.textContent.trim());
      const heads = all("thead th", block).map((heading) => $("button", heading).childNodes[0].textContent.trim());
      const lines = Array.from(body.rows).filter((row) => !row.hidden).map((row) => Array.from(row.cells).map(text).join("\t"));
      copy([heads.join("\t"), ...lines].join("\n"), "Table copied");
    });
  });

  /* ---- places ---- */
  function reveal() {
    const hash = decodeURIComponent(location.hash.slice(1));
    const [id, choice] = hash.split(":", 2);
    const target = id && document.getElementById(id);
    if (!target) return;
    for (let outer = target.closest("details"); outer; outer = outer.parentElement.closest("details")) outer.open = true;
    if (target.tagName === "DETAILS") target.open = true;
    drawVisible(target.closest("section") || document);
    if (choice && groups.has(id)) groups.get(id).set(choice.split("|"));
    target.scrollIntoView();
  }
  function go(anchor) { if (location.hash === anchor) reveal(); else location.hash = anchor; }
  window.addEventListener("hashchange", reveal);
  all("details.fold").forEach((fold) => fold.addEventListener("toggle", () => { if (fold.open) drawVisible(fold); }));

  const links = new Map(all(".contents a").map((link) => [link.getAttribute("href").slice(1), link]));
  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    links.forEach((link) => link.classList.remove("here"));
    const link = links.get(entry.target.id);
    if (link) link.classList.add("here");
  }), { rootMargin: "-15% 0px -75% 0px" });
  all("main > section").forEach((section) => watcher.observe(section));

  /* ---- width, system theme, paper ---- */
  let width = window.innerWidth, timer;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(timer);
    timer = setTimeout(() => drawn.forEach((chart) => chart.draw()), 120);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((chart) => chart.draw()));
  let before;
  window.addEventListener("beforeprint", () => { before = root.dataset.theme || ""; setTheme("light"); });
  window.addEventListener("afterprint", () => setTheme(before));

  themeButton.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme || "") + 1) % themes.length];
    store.set(next);
    setTheme(next);
  });
  const kept = store.get();
  setTheme(themes.includes(kept) ? kept : "");
  drawVisible();
  groups.forEach((group) => group.show());
  reveal();
  root.dataset.ready = "true";
})();
