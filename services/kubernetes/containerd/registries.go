package containerd

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	dockerconfig "github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/containerd/containerd/v2/core/transfer"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/outbound"
)

// dockerHub is where images of docker.io come from: credentials are asked for by
// this name.
const dockerHub = "registry-1.docker.io"

// maxDownloads of one image run at a time, as with the CRI: each must be as fast as bounded demands, also on a slow
// line.
const maxDownloads = 3

// hostFile is a file in the directory of one registry (containerd
// docs/hosts.md).
type hostFile struct {
	path string // below hostsDir
	data []byte
	perm fs.FileMode
}

// asked is what a mirror can do. Its path is that of the API.
const asked = "capabilities = [\"pull\", \"resolve\", \"referrers\"]\noverride_path = true\n"

// hostFiles are the settings of all registries that have some: mirrors, own
// authorities, client certificates. A registry's directory is named after it;
// '*' is "_default". The registry's host is dropped from the reference, the path
// asked of each endpoint as it is.
func hostFiles(r config.Registries) []hostFile {
	registries := slices.Collect(maps.Keys(r.Mirrors))
	for host, c := range r.Config {
		if c.TLS != nil && !slices.Contains(registries, host) {
			registries = append(registries, host)
		}
	}
	slices.Sort(registries)
	var out []hostFile
	for _, registry := range registries {
		dir := registry
		if registry == "*" {
			dir = "_default"
		}
		mirror, own := r.Mirrors[registry]
		if !own { // containerd takes one directory for a registry, so this one has all that counts
			mirror = r.Mirrors["*"]
		}
		var urls []url.URL
		for _, endpoint := range mirror.Endpoints {
			u := endpoint.URL
			u.Path = config.RegistryPath(u, mirror.OverridePath)
			if slices.Contains(urls, u) || !own && !mirror.SkipFallback && u.Host == registry && u.Path == "/v2" {
				continue // containerd takes none of a file that has one twice
			}
			urls = append(urls, u)
		}
		// What belongs to no table comes first in the file, and is asked last: the registry itself, or what is instead
		// of it.
		last := registry
		var text string
		if n := len(urls) - 1; mirror.SkipFallback && n >= 0 {
			text, last, urls = fmt.Sprintf("server = %q\n", urls[n].String())+asked, urls[n].Host, urls[:n]
		}
		lines, files := tlsSettings(r, dir, last)
		text += lines
		for _, u := range urls {
			lines, its := tlsSettings(r, dir, u.Host)
			text += fmt.Sprintf("[host.%q]\n", u.String()) + asked + lines
			files = append(files, its...)
		}
		out = append(out, hostFile{path: filepath.Join(dir, "hosts.toml"), data: []byte(text), perm: 0o644})
		out = append(out, files...)
	}
	return out
}

// tlsSettings are the lines, and the files that they name, for one host.
func tlsSettings(r config.Registries, dir, host string) (lines string, files []hostFile) {
	t := cmp.Or(r.Config[host].TLS, r.Config["*"].TLS)
	if t == nil {
		return "", nil
	}
	name := strings.NewReplacer(":", "_", "*", "_all", "[", "", "]", "").Replace(host)
	file := func(suffix string, data []byte, perm fs.FileMode) string {
		files = append(files, hostFile{path: filepath.Join(dir, name+suffix), data: data, perm: perm})
		return name + suffix
	}
	if len(t.CA) > 0 {
		lines += fmt.Sprintf("ca = %q\n", file(".ca.pem", t.CA, 0o644))
	}
	if len(t.ClientIdentity.Crt) > 0 {
		crt := file(".client.pem", t.ClientIdentity.Crt, 0o644)
		key := file(".client-key.pem", t.ClientIdentity.Key, 0o600)
		lines += fmt.Sprintf("client = [[%q, %q]]\n", crt, key)
	}
	if t.InsecureSkipVerify {
		lines += "skip_verify = true\n"
	}
	return lines, files
}

// writeHosts replaces the settings of all registries.
func writeHosts(dir string, r config.Registries) error {
	if err := untrusted.RemoveAll(dir); err != nil {
		return err
	}
	for _, f := range hostFiles(r) {
		path := filepath.Join(dir, f.path)
		if err := errors.Join(untrusted.MkdirAll(filepath.Dir(path), 0o755), untrusted.WriteFile(path, f.data, f.perm)); err != nil {
			return err
		}
	}
	return nil
}

// logins are the credentials in the form of the CRI.
func logins(r config.Registries) table {
	out := table{}
	for host := range r.Config {
		user, secret, ok := login(r, host)
		if !ok {
			continue
		}
		auth := table{"username": user, "password": secret}
		if user == "" {
			auth = table{"identitytoken": secret}
		}
		out[host] = table{"auth": auth}
		if host == "docker.io" {
			out[dockerHub] = out[host]
		}
	}
	return out
}

// login is how the node shows who it is to a host: user and password, or "" and
// an identity token.
func login(r config.Registries, host string) (user, secret string, ok bool) {
	settings, known := r.Config[host]
	if !known && host == dockerHub {
		settings = r.Config["docker.io"]
	}
	return loginOf(settings.Auth)
}

// loginOf is the same for what is given for a host; nil: nothing.
func loginOf(a *config.RegistryAuth) (user, secret string, ok bool) {
	switch {
	case a == nil:
		return "", "", false
	case a.Username != "":
		return a.Username, string(a.Password), true
	case a.IdentityToken != "":
		return "", string(a.IdentityToken), true
	}
	both, err := base64.StdEncoding.DecodeString(string(a.Auth))
	if err != nil {
		return "", "", false // checks refuse it
	}
	user, secret, ok = strings.Cut(string(both), ":")
	return user, secret, ok
}

// origin is how the system's own pulls reach a registry: by the mirrors and with
// the settings that the CRI uses too (one hosts directory for both), the proxies
// and the authorities of the moment.
type origin struct {
	hostsDir string
	bundle   string
	machine  config.Machine
	pod      *podAuth // of a pod for whom the image is; nil: that of the machine
}

// resolver is made for one pull; done closes its connections.
func (o origin) resolver(ctx context.Context) (r remotes.Resolver, done func()) {
	hosts, done := o.hosts(ctx)
	registry := docker.NewResolver(docker.ResolverOptions{Hosts: hosts})
	if limited, ok := registry.(remotes.ResolverWithOptions); ok {
		limited.SetOptions(transfer.WithDownloadLimiter(semaphore.NewWeighted(maxDownloads)))
	}
	return manifests{registry}, done
}

// hosts are those of a registry, in the order in which they are asked.
func (o origin) hosts(ctx context.Context) (hosts docker.RegistryHosts, done func()) {
	var clients []*http.Client
	options := dockerconfig.HostOptions{
		HostDir: dockerconfig.HostDirFromRoot(o.hostsDir),
		Credentials: func(host string) (string, string, error) {
			if o.pod != nil {
				user, secret := o.pod.login(host)
				return user, secret, nil
			}
			user, secret, _ := login(o.machine.Registries, host)
			return user, secret, nil
		},
		UpdateClient: func(c *http.Client) error {
			if err := o.update(c); err != nil {
				return err
			}
			clients = append(clients, c)
			return nil
		},
	}
	return dockerconfig.ConfigureHosts(ctx, options), func() {
		for _, c := range clients {
			c.CloseIdleConnections()
		}
	}
}

// manifests is a registry that is believed only with the manifest of an image. What else answers for it, such as the
// page of a proxy that wants a login, would be stored under the image's name, and never be asked for again.
type manifests struct{ remotes.Resolver }

// Resolve implements remotes.Resolver.
func (m manifests) Resolve(ctx context.Context, ref string) (string, ocispec.Descriptor, error) {
	name, found, err := m.Resolver.Resolve(ctx, ref)
	if err == nil && !images.IsManifestType(found.MediaType) && !images.IsIndexType(found.MediaType) {
		err = fmt.Errorf("%q is the type of what is there instead of a manifest: maybe a proxy or a login page answers for the registry", found.MediaType)
	}
	return name, found, err
}

// Fetcher implements remotes.Resolver.
func (m manifests) Fetcher(ctx context.Context, ref string) (remotes.Fetcher, error) {
	f, err := m.Resolver.Fetcher(ctx, ref)
	return fetcher{f}, err
}

// fetcher asks only the registry and its mirrors: a list of further URLs, which may be anybody's, would be followed
// without limits of time, and without the proxies and authorities of the node.
type fetcher struct{ remotes.Fetcher }

// Fetch implements remotes.Fetcher.
func (f fetcher) Fetch(ctx context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
	d.URLs = nil
	return f.Fetcher.Fetch(ctx, d)
}

// FetchReferrers implements remotes.ReferrersFetcher.
func (f fetcher) FetchReferrers(ctx context.Context, of digest.Digest, options ...remotes.FetchReferrersOpt) ([]ocispec.Descriptor, error) {
	lists, ok := f.Fetcher.(remotes.ReferrersFetcher)
	if !ok {
		return nil, errors.New("the registry's client can't list what refers to an image")
	}
	return lists.FetchReferrers(ctx, of, options...)
}

// update gives a client our proxies and authorities. Go would read both once per
// process. The authorities of one host's own settings, which the client may have
// already, go on with that client only.
func (o origin) update(c *http.Client) error {
	old, ok := c.Transport.(*http.Transport)
	if !ok {
		return fmt.Errorf("unexpected transport %T of a registry's client", c.Transport)
	}
	pool, err := outbound.Authorities(o.bundle, old.TLSClientConfig.RootCAs)
	if err != nil {
		return err
	}
	t := old.Clone()
	t.TLSClientConfig.RootCAs = pool
	t.Proxy = outbound.Proxy(o.machine.Env)
	t.ResponseHeaderTimeout = answerWait
	c.Transport = bounded{t, silenceWait}
	return nil
}

// probeTime is for each server, at the same time.
const probeTime = 3 * time.Second

// Registry is how one of the servers of a registry answers.
type Registry struct {
	Of     string // whose images it has
	URL    string // of its API
	Mirror bool   // it is one, and not the registry itself
	Err    error  // nil: it answers; whether the node may have images isn't asked
}

// Registries asks the registries of the node's images, and those that have mirrors.
func Registries(ctx context.Context, cfg *config.Config) []*Registry {
	names := maps.Collect(maps.All(cfg.Machine.Registries.Mirrors))
	delete(names, "*") // it stands for others
	for _, image := range cfg.Images() {
		if name, err := reference.ParseNormalizedNamed(image); err == nil {
			names[reference.Domain(name)] = config.Mirror{}
		}
	}
	return origin{hostsDir: hostsDir, bundle: boot.CABundle, machine: cfg.Machine}.probe(ctx, slices.Sorted(maps.Keys(names)))
}

// probe begins as a pull does: at each server of the registries, with the proxies and settings of TLS that pulls have.
func (o origin) probe(ctx context.Context, names []string) (all []*Registry) {
	hosts, done := o.hosts(ctx)
	defer done()
	var wg sync.WaitGroup
	for _, name := range names {
		servers, _ := hosts(name) // a pull says what is wrong with the settings
		usual, _ := docker.DefaultHost(name)
		for _, s := range servers {
			r := &Registry{Of: name, URL: s.Scheme + "://" + s.Host + s.Path + "/", Mirror: s.Host != usual}
			all = append(all, r)
			wg.Go(func() {
				// Theirs may be one for all. Where a registry sends the node isn't looked at: that is an answer.
				client := &http.Client{Transport: s.Client.Transport, Timeout: probeTime, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
				resp, err := client.Get(r.URL)
				if r.Err = err; err == nil && resp.Body.Close() == nil && resp.StatusCode >= http.StatusInternalServerError {
					r.Err = errors.New(r.URL + ": " + resp.Status)
				}
			})
		}
	}
	wg.Wait()
	return all
}
