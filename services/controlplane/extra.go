package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"golang.org/x/net/http/httpproxy"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/kubernetes"
	"github.com/garboard-os/garboard/services/resource"
)

const (
	// fetchTimeout bounds one download; maxManifest its size. The largest manifests
	// around, of operators with their definitions, are a few MB.
	fetchTimeout = time.Minute
	maxManifest  = 32 << 20
)

// extraManifests are the manifests from URLs (S-265): of a custom CNI, and extra ones.
var extraManifests = Manifests.In("extras")

// fetchExtras publishes them. Each is downloaded once for each boot and change of the
// list: what a cluster is made of doesn't change under its feet.
func fetchExtras(ctx context.Context, v resource.View, c *config.Config) error {
	wanted := map[string]bool{}
	var problems []error
	for _, u := range extraURLs(&c.Cluster) {
		id := "05-" + u.String()
		wanted[id] = true
		if _, err := extraManifests.Get(v, id); err == nil {
			continue
		}
		objects, err := fetchManifest(ctx, proxyClient(c.Machine.Env), u)
		if err != nil {
			problems = append(problems, err)
			continue
		}
		if err := extraManifests.Put(v, id, objects); err != nil {
			return err
		}
	}
	return errors.Join(append(problems, prune(v, extraManifests, wanted))...)
}

func extraURLs(c *config.Cluster) []config.URL {
	var urls []config.URL
	if c.Network.CNI.Name == config.CNICustom {
		urls = append(urls, c.Network.CNI.URLs...)
	}
	return append(urls, c.ExtraManifests...)
}

// proxyClient follows the proxies that the machine configuration names, not those of
// our own environment.
func proxyClient(env map[string]string) *http.Client {
	first := func(names ...string) string {
		for _, name := range names {
			if v := env[name]; v != "" {
				return v
			}
		}
		return ""
	}
	proxies := httpproxy.Config{
		HTTPProxy: first("http_proxy", "HTTP_PROXY"), HTTPSProxy: first("https_proxy", "HTTPS_PROXY"), NoProxy: first("no_proxy", "NO_PROXY"),
	}
	choose := proxies.ProxyFunc()
	return &http.Client{
		Timeout:   fetchTimeout,
		Transport: &http.Transport{Proxy: func(r *http.Request) (*url.URL, error) { return choose(r.URL) }, DisableKeepAlives: true},
	}
}

func fetchManifest(ctx context.Context, client *http.Client, u config.URL) ([]kubernetes.Object, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, fmt.Errorf("manifest %s: %w", u, err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("manifest: %w", err) // names the URL
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("manifest %s: the server answered %s", u, resp.Status)
	}
	objects, err := decodeManifest(io.LimitReader(resp.Body, maxManifest))
	if err != nil {
		return nil, fmt.Errorf("manifest %s: %w", u, err)
	}
	return objects, nil
}
