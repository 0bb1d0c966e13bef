// Browsers start no worker for a page that is read from the disk: there the search works in a hidden frame.
// mkdocs-material knows such a stand-in by the name IFrameWorker, and this file by its own.
"use strict";
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script src="${script}"></script>`;
      this.inside = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          resolve(frame.contentWindow);
        });
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
