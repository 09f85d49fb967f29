import { useEffect, useReducer, useRef } from "./vendor/preact.js";

export const useRedraw = () => useReducer((n) => n + 1, 0)[1];

// One frame after the other, while it is shown.
export function useFrames(act) {
  const latest = useRef(act);
  latest.current = act;
  useEffect(() => {
    let id = requestAnimationFrame(function frame(now) { latest.current(now); id = requestAnimationFrame(frame); });
    return () => cancelAnimationFrame(id);
  }, []);
}
