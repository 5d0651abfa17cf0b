package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/garboard-os/garboard/qemu/network"
)

// control returns the handler for the UNIX socket in the cluster's directory, which only its
// owner may enter:
//
//	GET  /status                      all nodes
//	POST /nodes/NAME/VERB             on, off, cut, freeze, thaw, nmi
//	POST /nodes/NAME/network?conditions=…  of its network: network.Conditions in JSON
//	POST /endpoint/VERB               on, off: the load balancer, for the nodes
//	POST /nodes/NAME/clock?offset=D   how wrong its clock is from its next start on
//	POST /stop?budget=DURATION        ends the process
//
// After /stop every other POST is refused: the client waits for the end of the process.
func (h *hostProcess) control() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		all := make([]NodeStatus, 0, len(h.nodes))
		for _, n := range h.nodes {
			all = append(all, n.status())
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(all)
	})
	verbs := map[string]func(n *node, r *http.Request) error{
		"on":     func(n *node, r *http.Request) error { return n.turnOn(r.Context()) },
		"off":    func(n *node, _ *http.Request) error { return n.powerOff(stopBudgetEmulated) },
		"cut":    func(n *node, _ *http.Request) error { return n.cut() },
		"freeze": func(n *node, r *http.Request) error { return n.freeze(r.Context(), true) },
		"thaw":   func(n *node, r *http.Request) error { return n.freeze(r.Context(), false) },
		"nmi":    func(n *node, r *http.Request) error { return n.interrupt(r.Context()) },
		"network": func(n *node, r *http.Request) error {
			var to network.Conditions
			if err := json.Unmarshal([]byte(r.FormValue("conditions")), &to); err != nil {
				return err
			}
			return h.setNetwork(n, to)
		},
		"clock": func(n *node, r *http.Request) error {
			offset, err := time.ParseDuration(r.FormValue("offset"))
			if err != nil {
				return err
			}
			return h.setClock(n, offset)
		},
	}
	serve := func(pattern string, do func(r *http.Request) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			err := errStopping
			if !h.stops() || r.URL.Path == "/stop" {
				err = do(r)
			}
			if errors.Is(err, errStopping) {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
			} else if err != nil {
				http.Error(w, err.Error(), http.StatusConflict)
			}
		})
	}
	serve("POST /nodes/{name}/{verb}", func(r *http.Request) error {
		do, ok := verbs[r.PathValue("verb")]
		if !ok {
			return errors.New("no such verb: " + r.PathValue("verb"))
		}
		n, err := h.node(r.PathValue("name"))
		if err != nil {
			return err
		}
		return do(n, r)
	})
	for verb, on := range map[string]bool{"on": true, "off": false} {
		serve("POST /endpoint/"+verb, func(*http.Request) error {
			if h.ports == nil {
				return errOfDocker
			}
			return h.ports.setEndpoint(on)
		})
	}
	serve("POST /stop", func(r *http.Request) error {
		budget, err := time.ParseDuration(r.FormValue("budget"))
		if err == nil {
			h.askStop(budget)
		}
		return err
	})
	return mux
}

// longestSocket is the size of sun_path of unix(7), with the final zero.
const longestSocket = 107

// socketPath returns a path for a socket that is short enough, for any directory: where the
// path is too long, it goes through an open descriptor of the directory.
func socketPath(path string) (short string, done func(), err error) {
	if len(path) <= longestSocket {
		return path, func() {}, nil
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)), func() { dir.Close() }, nil
}

func listenUnix(path string) (net.Listener, error) {
	// The caller holds the lock, so an existing socket is that of a process that has ended.
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	short, done, err := socketPath(path)
	if err != nil {
		return nil, err
	}
	defer done()
	return net.Listen("unix", short)
}

// ErrSilent is the error where there is no host process, or where it is starting or
// stopping.
var ErrSilent = errors.New("its host process doesn't serve")

// ask sends one request to a cluster's host process. The error wraps ErrSilent where the
// process is starting or stopping.
func ask(ctx context.Context, d clusterDir, method, path string, answer any) error {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			short, done, err := socketPath(d.socket())
			if err != nil {
				return nil, err
			}
			defer done()
			return new(net.Dialer).DialContext(ctx, "unix", short)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://host"+path, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("cluster %s: %w: %w", filepath.Base(string(d)), ErrSilent, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("cluster %s: %w: %w", filepath.Base(string(d)), ErrSilent, err)
	}
	switch said := errors.New(strings.TrimSpace(string(body))); resp.StatusCode {
	case http.StatusOK:
	case http.StatusServiceUnavailable:
		return fmt.Errorf("cluster %s: %w: %w", filepath.Base(string(d)), ErrSilent, said)
	default:
		return said
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(body, answer)
}
