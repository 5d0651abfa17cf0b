//go:build e2e && long

// Package registries tests pulls from a real registry, with TLS and a login, through caches and through a proxy that
// opens TLS.
package registries

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/crypto/bcrypt"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// startBudget is for the start of a registry, and pullBudget for a small image and its container.
	startBudget = 20 * time.Second
	pullBudget  = time.Minute
	// gateway is this machine in the nodes' network.
	gateway = "10.5.0.1"
)

// distribution builds the registry, once for all tests.
var distribution = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "garboard-registry-")
	if err != nil {
		return "", err
	}
	program := filepath.Join(dir, "registry")
	build := exec.Command("go", "build", "-mod=readonly", "-o", program, "github.com/distribution/distribution/v3/cmd/registry")
	build.Dir = "distribution"
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the registry: %w: %s", err, out)
	}
	return program, nil
})

// serve runs the registry with settings, which are JSON, a form of YAML.
func serve(t *testing.T, inside *osthread.Thread, storage, address string, settings map[string]any) {
	t.Helper()
	program, err := distribution()
	if err != nil {
		t.Fatal(err)
	}
	full := map[string]any{"version": "0.1", "storage": map[string]any{"filesystem": map[string]any{"rootdirectory": storage}}, "http": map[string]any{"addr": address}}
	for key, value := range settings {
		full[key] = value
	}
	text, err := json.Marshal(full)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "registry.yml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	e2etest.Run(t, inside, program, "serve", file)
	eventually.That(t, startBudget, "the registry listens on "+address, func() error {
		var conn net.Conn
		var err error
		if inside != nil {
			conn, err = inside.Dial(t.Context(), address)
		} else {
			conn, err = net.Dial("tcp", address)
		}
		if err == nil {
			conn.Close()
		}
		return err
	})
}

func localhost(t *testing.T) string {
	t.Helper()
	return freeport.Find(t).String()
}

// Each of the five registries has a cache of its own, a real one. The nodes pull through them. The next cluster gets
// all from the caches: it works without the registries. (S-133, S-135)
func TestS133Caches(t *testing.T) {
	made := e2etest.Built(t, qemu.Container)
	var mu sync.Mutex // guards blobs
	var blobs []string
	others, names, layers := ownImages(t)
	images := registry.New(made.Layout, others)
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/blobs/") {
			mu.Lock()
			blobs = append(blobs, r.URL.Path)
			mu.Unlock()
		}
		images.ServeHTTP(w, r)
	}))
	t.Cleanup(upstream.Close)
	mirrors, storage := map[string][]string{}, t.TempDir()
	for _, host := range cachedHosts {
		address := localhost(t)
		serve(t, nil, filepath.Join(storage, host), address, map[string]any{"proxy": map[string]any{"remoteurl": upstream.URL}})
		mirrors[host] = []string{"http://" + address}
	}
	nothing := t.TempDir()
	if _, err := layout.Write(nothing, empty.Index); err != nil {
		t.Fatal(err)
	}
	options := func(o *qemu.Options) { o.Images, o.Mirrors = nothing, mirrors }
	first, m := e2etest.Ready(t, "caches", qemu.Container, options)
	pull := func(c *e2etest.Cluster) {
		for _, image := range names {
			c.Gbctl("-n", c.Node(), "images", "pull", "-k", image)
		}
	}
	pull(first)
	eventually.That(t, pullBudget, "the caches, which store a layer after they have sent it, have all layers", func() error {
		for _, link := range layers {
			if _, err := os.Stat(filepath.Join(storage, link)); err != nil {
				return err
			}
		}
		return nil
	})
	m.Reached("the caches have all images")
	first.Down()
	mu.Lock()
	cold := len(blobs)
	mu.Unlock()
	if cold == 0 {
		t.Error("nothing was pulled through the caches")
	}
	for _, image := range append(config.DefaultImages(), names...) {
		host, rest, _ := strings.Cut(image, "/")
		repository, _, _ := strings.Cut(rest, ":")
		if _, err := os.Stat(filepath.Join(storage, host, "docker/registry/v2/repositories", repository)); err != nil {
			t.Errorf("the cache of %s doesn't have %s: %v", host, repository, err)
		}
	}
	again, m := e2etest.Ready(t, "caches-again", qemu.Container, options)
	pull(again)
	m.Reached("the node is Ready from the caches")
	mu.Lock()
	defer mu.Unlock()
	// A layer of several images is pulled with the one that comes first, and a cache stores it for that one only:
	// another one may be the first now.
	for _, blob := range blobs[cold:] {
		shared := slices.ContainsFunc(blobs[:cold], func(b string) bool { return path.Base(b) == path.Base(blob) })
		if !shared || slices.Contains(blobs[:cold], blob) {
			t.Errorf("the second cluster has pulled %s from the registries", blob)
		}
	}
}

// The guide to clusters without the internet (guides §2): the images are pushed to a real registry, without the hosts
// of their names. A cluster that has this registry as a mirror of each host works.
func TestRegistryOfAnAirGap(t *testing.T) {
	source := httptest.NewServer(registry.New(e2etest.Built(t, qemu.Container).Layout))
	t.Cleanup(source.Close)
	bundle, nothing, address := filepath.Join(t.TempDir(), "images.tar"), t.TempDir(), localhost(t)
	e2etest.Gbctl(t, "images", "bundle", "-O", bundle, "--registry-mirror", "*="+source.URL)
	serve(t, nil, t.TempDir(), address, nil)
	e2etest.Gbctl(t, "images", "push", bundle, address)
	response, err := http.Get("http://" + address + "/v2/_catalog?n=100")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var catalog struct{ Repositories []string }
	if err := json.NewDecoder(response.Body).Decode(&catalog); err != nil {
		t.Fatal(err)
	}
	mirrors := map[string][]string{}
	for _, image := range config.DefaultImages() {
		host, rest, _ := strings.Cut(image, "/")
		mirrors[host] = []string{"http://" + address}
		if repository, _, _ := strings.Cut(rest, ":"); !slices.Contains(catalog.Repositories, repository) {
			t.Errorf("the registry has no %s: %v", repository, catalog.Repositories)
		}
	}
	if _, err := layout.Write(nothing, empty.Index); err != nil {
		t.Fatal(err)
	}
	_, m := e2etest.Ready(t, "airgap-guide", qemu.Container, func(o *qemu.Options) { o.Images, o.Mirrors = nothing, mirrors })
	m.Reached("the cluster works with the registry of the site")
}

// cachedHosts are the registries of the guides that have a cache each.
var cachedHosts = []string{"docker.io", "registry.k8s.io", "quay.io", "gcr.io", "ghcr.io"}

// ownImages makes an image of each of these registries, in a layout. A cache with a layer of one has a file for it in
// its storage.
func ownImages(t *testing.T) (dir string, names, layers []string) {
	t.Helper()
	dir = t.TempDir()
	all, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range cachedHosts {
		image, err := random.Image(1<<16, 2)
		if err == nil {
			image, err = mutate.ConfigFile(image, &v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH, RootFS: rootOf(t, image)})
		}
		ref := host + "/site/" + strings.ReplaceAll(host, ".", "-") + ":v1"
		if err == nil {
			err = all.AppendImage(image, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": ref}))
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, ref)
		manifest, err := image.Manifest()
		if err != nil {
			t.Fatal(err)
		}
		for _, layer := range manifest.Layers {
			layers = append(layers, filepath.Join(host, "docker/registry/v2/repositories/site", strings.ReplaceAll(host, ".", "-"), "_layers/sha256", layer.Digest.Hex, "link"))
		}
	}
	return dir, names, layers
}

func rootOf(t *testing.T, image v1.Image) v1.RootFS {
	t.Helper()
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	return config.RootFS
}

// site is a registry with TLS from an authority of its own, and a login. It asks clients for a certificate of that
// authority.
type site struct {
	authority pki.CA
	password  string
	crt, key  []byte // of a client
}

// store fills the storage of a registry with images, by their names in it, and with more layers.
func store(t *testing.T, storage, from string, images map[string]string, more ...v1.Layer) {
	t.Helper()
	address := localhost(t)
	t.Run("fill", func(t *testing.T) { // the registry ends with it
		serve(t, nil, storage, address, nil)
		index, err := layout.ImageIndexFromPath(from)
		if err != nil {
			t.Fatal(err)
		}
		manifest, err := index.IndexManifest()
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range manifest.Manifests {
			to, wanted := images[d.Annotations["org.opencontainers.image.ref.name"]]
			if !wanted {
				continue
			}
			ref, err := name.ParseReference(address + "/" + to)
			if err != nil {
				t.Fatal(err)
			}
			image, err := index.Image(d.Digest)
			if err == nil {
				image, err = mutate.AppendLayers(image, more...)
			}
			if err == nil {
				err = remote.Write(ref, image)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}

// start runs the registry of the site in the nodes' network.
func (s *site) start(t *testing.T, inside *osthread.Thread, storage, address string) {
	t.Helper()
	now := time.Now()
	var err error
	if s.authority, err = pki.NewKubernetesCA(now); err != nil {
		t.Fatal(err)
	}
	crt, key, err := s.authority.Issue(pki.Leaf{CN: "registry", IPs: []netip.Addr{netip.MustParseAddr(gateway)}, Server: true, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	if s.crt, s.key, err = s.authority.Issue(pki.Leaf{CN: "node", Client: true, Now: now}); err != nil {
		t.Fatal(err)
	}
	hash, err := bcrypt.GenerateFromPassword([]byte(s.password), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	serve(t, inside, storage, address, map[string]any{
		"http": map[string]any{"addr": address, "tls": map[string]any{
			"certificate": file("crt", crt), "key": file("key", key), "clientcas": []string{file("ca", s.authority.Cert)},
		}},
		"auth": map[string]any{"htpasswd": map[string]any{"realm": "site", "path": file("htpasswd", []byte("node:"+string(hash)+"\n"))}},
	})
}

// patch is the configuration with which a node pulls from a host, and not from the mirror of the test: its "not found"
// would count for containerd, and not what the host says.
func (s *site) patch(host, password, identity string) string {
	return fmt.Sprintf("machine: {registries: {mirrors: {%q: {endpoints: [\"https://%s\"]}}, config: {%q: {auth: {username: node, password: %q}, tls: {ca: %s%s}}}}}",
		host, host, host, password, base64.StdEncoding.EncodeToString(s.authority.Cert), identity)
}

func (s *site) identity() string {
	return fmt.Sprintf(", clientIdentity: {crt: %s, key: %s}", base64.StdEncoding.EncodeToString(s.crt), base64.StdEncoding.EncodeToString(s.key))
}

// A registry with TLS from its own authority, which asks for a certificate and a login, serves Kubernetes' pulls and
// the system's own. A missing certificate and a wrong password are named. All is changed on the running node. Then all
// goes through a proxy that opens TLS with an authority of its own. (S-136, S-145, S-146)
func TestS136RegistryOfASite(t *testing.T) {
	const kubelet, pause, etcd, pulled = "site/kubelet:1", "site/pause:1", "site/etcd:1", "site/pulled:1"
	storage := t.TempDir()
	from := e2etest.Built(t, qemu.Container).Layout
	store(t, storage, from, map[string]string{config.DefaultKubeletImage: kubelet, config.DefaultPauseImage: pause, config.DefaultEtcdImage: etcd})
	store(t, storage, from, map[string]string{config.DefaultPauseImage: pulled}, ownLayerOf(t))
	c, m := e2etest.Ready(t, "registry", qemu.Container)
	inside := c.Network()
	s := &site{password: "correct horse"}
	host := gateway + ":5443"
	s.start(t, inside, storage, host)

	patch := func(text string) {
		t.Helper()
		c.Gbctl("-n", c.Node(), "patch", "mc", "-p", text)
	}
	starts := func(pod, image string) {
		t.Helper()
		c.Kubectl("run", pod, "--image="+image, "--restart=Never")
		c.Eventually(pullBudget, "the pod "+pod+" runs", func() error {
			out, err := c.Try("get", "pod", pod, "-o", "jsonpath={.status.phase} {.status.containerStatuses[*].state.waiting.message}")
			if err == nil && !strings.HasPrefix(out, "Running") {
				err = errors.New(out)
			}
			return err
		})
	}
	// The system's own pulls are those of etcd, of the kubelet, and of whoever asks for one.
	systemPulls := func(from string) {
		t.Helper()
		patch("machine: {kubelet: {image: " + from + "/" + kubelet + "}}")
		c.Eventually(pullBudget, "the kubelet comes from "+from, func() error { return runsFrom(c, from+"/"+kubelet) })
		patch("cluster: {etcd: {image: " + from + "/" + etcd + "}}")
		c.Eventually(pullBudget, "etcd comes from "+from, func() error { return runsFrom(c, from+"/"+etcd) })
		c.Gbctl("-n", c.Node(), "images", "pull", from+"/"+pulled)
		c.Healthy()
	}

	refused := func(pod, why string) {
		t.Helper()
		c.Kubectl("run", pod, "--image="+host+"/"+pause, "--restart=Never")
		c.Eventually(pullBudget, "the registry refuses: "+why, func() error {
			out, err := c.Try("get", "events", "--field-selector", "involvedObject.name="+pod, "-o", "jsonpath={.items[*].message}")
			if err == nil && !strings.Contains(out, why) {
				err = errors.New(out)
			}
			return err
		})
		m.Reached("the registry refuses: " + why)
	}
	patch(s.patch(host, s.password, ""))
	refused("anonymous", "certificate required")
	patch(s.patch(host, "wrong", s.identity()))
	refused("refused", "401 Unauthorized")
	patch(s.patch(host, s.password, s.identity()))
	starts("direct", host+"/"+pause)
	// A mirror is a project of the registry, and the registry itself, which there isn't, is never asked.
	patch(fmt.Sprintf("machine: {registries: {mirrors: {project.test: {endpoints: [\"https://%s/v2/site\"], skipFallback: true}}}}", host))
	starts("project", "project.test/pause:1")
	c.Gbctl("-n", c.Node(), "images", "pull", "project.test/pulled:1")
	systemPulls(host)
	m.Reached("all pulls come from the registry")
	dir := t.TempDir()
	ca := filepath.Join(dir, "upstream.pem")
	client := filepath.Join(dir, "client.pem")
	if err := errors.Join(os.WriteFile(ca, s.authority.Cert, 0o600), os.WriteFile(client, append(s.key, s.crt...), 0o600)); err != nil {
		t.Fatal(err)
	}
	log := e2etest.Run(t, inside, "mitmdump", "--listen-host", gateway, "--listen-port", "3128", "--set", "confdir="+dir,
		"--set", "connection_strategy=lazy", "--set", "ssl_verify_upstream_trusted_ca="+ca, "--set", "client_certs="+client, "--map-remote", "|https://registry.test/|https://"+host+"/")
	var authority []byte
	eventually.That(t, startBudget, "the proxy has its authority", func() (err error) {
		authority, err = os.ReadFile(filepath.Join(dir, "mitmproxy-ca-cert.pem"))
		if errors.Is(err, fs.ErrNotExist) {
			return err
		}
		conn, err := inside.Dial(t.Context(), gateway+":3128")
		if err == nil {
			conn.Close()
		}
		return err
	})
	patch(fmt.Sprintf("machine: {env: {https_proxy: http://%s:3128, no_proxy: 10.5.0.0/24}, files: [{path: /etc/ssl/certs/ca-certificates, op: append, permissions: 0644, content: %q}], registries: {config: {registry.test: {auth: {username: node, password: %q}}}}}",
		gateway, authority, s.password))
	starts("proxied", "registry.test/"+pause)
	systemPulls("registry.test")
	m.Reached("all pulls come through the proxy")
	text, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	for _, repository := range []string{"site/pause", "site/kubelet", "site/etcd", "site/pulled"} {
		if !strings.Contains(string(text), "/v2/"+repository+"/manifests/1") {
			t.Errorf("%s wasn't pulled through the proxy:\n%s", repository, text)
		}
	}
}

// ownLayer is the size of a layer that no node has, in bytes.
const ownLayer = 4 << 20

func ownLayerOf(t *testing.T) v1.Layer {
	t.Helper()
	layer, err := random.Layer(ownLayer, types.OCILayer)
	if err != nil {
		t.Fatal(err)
	}
	return layer
}

// runsFrom returns why no container runs from an image.
func runsFrom(c *e2etest.Cluster, image string) error {
	out, err := c.TryGbctl("-n", c.Node(), "containers")
	if err != nil {
		return err
	}
	for line := range strings.Lines(out) {
		if strings.Contains(line, image) && strings.Contains(line, "RUNNING") {
			return nil
		}
	}
	return errors.New(out)
}
