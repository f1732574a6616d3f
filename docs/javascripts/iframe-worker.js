// Browsers start no worker from a file. Opened without a server, the site searches in a hidden frame.
if (location.protocol === "file:") window.Worker = class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inner = this.frame.contentWindow, script = inner.document.createElement("script");
    inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
    this.ready = new Promise(loaded => script.addEventListener("load", loaded));
    script.src = new URL(url, location);
    inner.document.body.append(script);
  }

  postMessage(data) {
    this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
};
