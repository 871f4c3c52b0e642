// Preact with templates instead of a build step.
import { Component, h, render } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { render, useEffect, useLayoutEffect, useMemo, useRef, useState };

// Returns a component that is drawn again only if one of its properties is another value.
export function pure(draw) {
  return class extends Component {
    shouldComponentUpdate(next) {
      const names = Object.keys(next);
      return names.length !== Object.keys(this.props).length || names.some((n) => next[n] !== this.props[n]);
    }
    render(props) {
      return draw(props);
    }
  };
}
