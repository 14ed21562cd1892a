// Where the numbers come from: the local server, or data inside the page (a static export). Both answer the same four questions.

const ARRAYS = { float32: Float32Array, float64: Float64Array, int32: Int32Array };

export function makeSource() {
  const embedded = document.getElementById("embedded");
  return embedded ? fromPage(JSON.parse(embedded.textContent)) : fromServer();
}

function fromServer() {
  const get = async (path) => {
    const answer = await fetch(path);
    if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? `the server answered ${answer.status}`);
    return answer;
  };
  const json = async (path) => (await get(path)).json();
  return {
    run: () => json("api/run"),
    step: (step) => json(`api/steps/${step}`),
    token: (step, group, at) => json(`api/steps/${step}/prompts/${group}/tokens/${at}`),
    column: async (step, group, name) => {
      const answer = await get(`api/steps/${step}/prompts/${group}/columns/${encodeURIComponent(name)}`);
      return new ARRAYS[answer.headers.get("X-Dtype")](await answer.arrayBuffer());
    },
  };
}

function fromPage(data) {
  const unpacked = new Map();
  const column = async (step, group, name) => {
    const key = `${step}/${group}/${name}`;
    if (!unpacked.has(key)) {
      const packed = data.steps[step]?.columns[group]?.[name];
      if (!packed) throw new Error(`this page has no column ${name} of step ${step}, prompt ${group}`);
      const bytes = Uint8Array.from(atob(packed[1]), (char) => char.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      unpacked.set(key, new ARRAYS[packed[0]](await new Response(stream).arrayBuffer()));
    }
    return unpacked.get(key);
  };
  const stepOf = (step) => {
    if (!data.steps[step]) throw new Error(`this page has no step ${step}; it has ${Object.keys(data.steps).join(", ")}`);
    return data.steps[step];
  };
  return {
    run: async () => data.run,
    step: async (step) => stepOf(step).info,
    column,
    token: async (step, group, at) => {
      const { info, words, flags } = stepOf(step);
      const out = { text: info.texts[(await column(step, group, "text"))[at]] };
      for (const { name } of info.columns) {
        const value = (await column(step, group, name))[at];
        out[name] = words[name] ? words[name][value] ?? null : Number.isNaN(value) ? null : flags.includes(name) ? value === 1 : value;
      }
      return out;
    },
  };
}
