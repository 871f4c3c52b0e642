// Loads something again whenever `version` changes, not more often than every `pause` milliseconds.
import { useEffect, useRef, useState } from "./html.js";
import { measureDrawn } from "./store.js";

// Returns `next` with the parts of `known` that are equal to its own, so that what shows them is not drawn again.
export function shared(known, next) {
  if (known === next || !known || !next || typeof known !== "object" || typeof next !== "object") return next;
  const isList = Array.isArray(next);
  if (isList !== Array.isArray(known)) return next;
  const names = Object.keys(next);
  const found = isList ? [] : {};
  let isSame = names.length === Object.keys(known).length;
  for (const name of names) {
    found[name] = shared(known[name], next[name]);
    isSame &&= found[name] === known[name];
  }
  return isSame ? known : found;
}

export function useLatest(load, version, pause) {
  const [found, setFound] = useState({ data: null, error: "" });
  const state = useRef({ isBusy: false, isDue: false, last: -Infinity, timer: 0, isGone: false });
  const current = useRef(load);
  current.current = load;

  async function run() {
    const own = state.current;
    own.isBusy = true;
    own.isDue = false;
    own.last = performance.now();
    const asked = current.current;
    try {
      const data = await asked();
      const began = performance.now();
      if (!own.isGone) setFound((known) => ({ data: shared(known.data, data), error: "" }));
      measureDrawn("reload", began);
    } catch (error) {
      if (!own.isGone) setFound((known) => ({ data: known.data, error: error.message }));
    }
    own.isBusy = false;
    if (own.isDue) request();
  }

  function request() {
    const own = state.current;
    if (own.isGone) return;
    own.isDue = true;
    if (own.isBusy) return;
    clearTimeout(own.timer);
    const wait = own.last + pause - performance.now();
    if (wait <= 0) run();
    else own.timer = setTimeout(run, wait);
  }

  useEffect(request, [version]);
  useEffect(() => () => {
    state.current.isGone = true;
    clearTimeout(state.current.timer);
  }, []);
  return { ...found, again: request };
}
