//go:build e2e && long

package registries

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// broken are registries that don't do what they should, by the first part of the image's name, with what the node says
// about each.
var broken = map[string]string{
	"denied":    "401 Unauthorized",
	"limited":   "429 Too Many Requests",
	"failing":   "500 Internal Server Error",
	"missing":   "not found",
	"wrong":     "instead of a manifest",
	"truncated": "EOF",
	"corrupted": "unexpected commit digest",
	"silent":    "timeout awaiting response headers",
	"stops":     "has sent less than 64 KiB within 1m0s",
}

// faults are the ways in which a registry still breaks: their channels are closed when they are over.
type faults map[string]chan struct{}

func (f faults) over(how string) bool {
	select {
	case <-f[how]:
		return true
	default:
		return false
	}
}

// breakRegistry makes a registry break as the image's name says, in its first part, until that is over.
func breakRegistry(images http.Handler, still faults) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		how, rest, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/v2/"), "/")
		r.URL.Path = "/v2/" + rest
		if still.over(how) {
			images.ServeHTTP(w, r)
			return
		}
		status := map[string]int{"denied": http.StatusUnauthorized, "limited": http.StatusTooManyRequests, "failing": http.StatusInternalServerError, "missing": http.StatusNotFound}[how]
		large := strings.Contains(rest, "/blobs/")
		switch {
		case status != 0:
			http.Error(w, http.StatusText(status), status)
		case how == "silent":
			select {
			case <-still[how]:
			case <-r.Context().Done():
			}
			panic(http.ErrAbortHandler)
		case how == "wrong":
			w.Header().Set("Content-Type", "text/html")
			fmt.Fprint(w, "<html>Please log in</html>")
		case large && r.Method == http.MethodGet && (how == "truncated" || how == "corrupted" || how == "stops"):
			whole := httptest.NewRecorder()
			r.Header.Del("Range")
			images.ServeHTTP(whole, r)
			body := whole.Body.Bytes()
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
			if how == "corrupted" {
				body[len(body)/2] ^= 1
				w.Write(body)
				return
			}
			w.Write(body[:len(body)/2])
			if how == "stops" {
				w.(http.Flusher).Flush()
				select {
				case <-still[how]:
				case <-r.Context().Done():
				}
			}
			panic(http.ErrAbortHandler)
		default:
			images.ServeHTTP(w, r)
		}
	})
}

// podsError is what containerd's CRI says of a registry. It believes that a page is a manifest, but doesn't find its
// image in it.
func podsError(how string) string {
	if how == "wrong" {
		return "text/html"
	}
	return broken[how]
}

// pull pulls an image as for a pod.
func pull(c *e2etest.Cluster, image string) (string, error) {
	return c.Patient(pullBudget).TryGbctl("-n", c.Node(), "images", "pull", "-k", image)
}

// healBudget is for the next attempt: a service that has failed again and again waits for two minutes.
const healBudget = 4 * time.Minute

// contentStore is containerd's on a node. What is being written is in ingest.
const contentStore = "/var/lib/containerd/io.containerd.content.v1.content/"

// Registries break in all ways. Each time the node says what is wrong, within a bounded time, keeps no damaged part of
// the image, and tries again: once the registry is well, the kubelet runs from the same image, and nothing half-pulled
// stays.
func TestBrokenRegistries(t *testing.T) {
	dir, from := t.TempDir(), e2etest.Built(t, qemu.Container).Layout
	layers, still := map[string]string{}, faults{}
	for how := range broken {
		layer := ownLayerOf(t) // each image has one that no other image has, so that it must be pulled
		digest, err := layer.Digest()
		if err != nil {
			t.Fatal(err)
		}
		layers[how], still[how] = digest.Hex, make(chan struct{})
		store(t, dir, from, map[string]string{config.DefaultKubeletImage: "site/" + how + ":1"}, layer)
	}
	well := localhost(t)
	serve(t, nil, dir, well, nil)
	to, err := url.Parse("http://" + well)
	if err != nil {
		t.Fatal(err)
	}
	c, m := e2etest.Ready(t, "broken", qemu.Container)
	inside, host := c.Network(), gateway+":5081"
	l, err := inside.Listen(host)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: breakRegistry(httputil.NewSingleHostReverseProxy(to), still)}
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(l) }) // until it is closed
	t.Cleanup(func() {
		for how, over := range still {
			if !still.over(how) {
				close(over)
			}
		}
		server.Close()
		served.Wait()
	})
	c.Gbctl("-n", c.Node(), "patch", "mc", "-p", fmt.Sprintf("machine: {registries: {mirrors: {broken.test: {endpoints: [\"http://%s\"]}}}}", host))
	blobs := func() string { return c.Gbctl("-n", c.Node(), "ls", contentStore+"blobs/sha256") }
	for _, how := range slices.Sorted(maps.Keys(broken)) {
		image := "broken.test/" + how + "/site/" + how + ":1"
		c.Gbctl("-n", c.Node(), "patch", "mc", "-p", "machine: {kubelet: {image: "+image+"}}")
		budget := pullBudget
		if strings.Contains(broken[how], "time") || strings.Contains(broken[how], "1m0s") {
			budget *= 3
		}
		c.Eventually(budget, "the node says what is wrong with the registry: "+how, func() error {
			out, err := c.TryGbctl("-n", c.Node(), "service", "kubelet")
			if err == nil && (!strings.Contains(out, broken[how]) || !strings.Contains(out, image)) {
				err = errors.New(out)
			}
			return err
		})
		if budget == pullBudget { // otherwise, a pod's puller waits for longer
			if out, err := pull(c, image); err == nil || !strings.Contains(out+err.Error(), podsError(how)) {
				t.Errorf("%s, for a pod: %v, want %q\n%s", how, err, podsError(how), out)
			}
		}
		m.Reached(how + " is named")
		if out := c.Gbctl("-n", c.Node(), "images", "--node"); strings.Contains(out, image) {
			t.Errorf("%s: the node has the image:\n%s", how, out)
		}
		if strings.Contains(blobs(), layers[how]) {
			t.Errorf("%s: the node has the layer %s", how, layers[how])
		}
		close(still[how])
		c.Eventually(healBudget, "the kubelet runs from the same image: "+how, func() error { return runsFrom(c, image) })
		if all := blobs(); !strings.Contains(all, layers[how]) {
			t.Errorf("%s: the node doesn't have the layer %s of its kubelet:\n%s", how, layers[how], all)
		}
		if out, err := pull(c, image); err != nil {
			t.Errorf("%s is over, and a pod can't have the image: %v\n%s", how, err, out)
		}
		m.Reached(how + " is over")
	}
	c.Ready(m)
	// containerd removes what is half-pulled a while after the pull that has left it.
	half := regexp.MustCompile("[0-9a-f]{64}")
	c.Eventually(pullBudget, "nothing half-pulled stays", func() error {
		out, err := c.TryGbctl("-n", c.Node(), "ls", contentStore+"ingest")
		if err == nil && half.MatchString(out) {
			err = errors.New(out)
		}
		return err
	})
}
