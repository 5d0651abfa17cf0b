package balancer

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	// listFile is the last list from Kubernetes, on STATE.
	listFile = "api-servers.json"
	listMode = 0o600
	// maxServers are taken from it: clusters have three API servers, or five.
	maxServers = 16

	// watchTime is how long one watch goes on; the server ends them after some minutes
	// in any case.
	watchTime = 5 * time.Minute
	// joinPoll is the pause of a node that hasn't joined: control planes sign its first certificate, and it asks
	// Kubernetes for them with its token.
	joinPoll = time.Second
	// Pauses between tries: the API server may only just start, or be gone for long.
	againFirst = time.Second
	againMax   = 30 * time.Second
)

// slices of default/kubernetes: the bootstrap manifests let nodes read this one, and those that join.
var (
	servers   = kubeclient.Ref{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice", Namespace: "default"}
	selection = kubeclient.Selection{Fields: "metadata.name=kubernetes"}
)

// serverList is the list of API servers from Kubernetes.
type serverList struct {
	o    Options
	log  *slog.Logger
	mark func() // wakes the reader of the list

	mu      sync.Mutex // guards all below
	servers []netip.AddrPort
}

func (s *serverList) list() []netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.servers
}

// load reads the list of the last boot. Without it there is the endpoint.
func (s *serverList) load() {
	data, err := os.ReadFile(s.o.file)
	var found []netip.AddrPort
	if err == nil {
		err = json.Unmarshal(data, &found)
	}
	if err == nil {
		s.servers = found[:min(len(found), maxServers)]
	} else if boot.IgnoreMissing(err) != nil {
		s.log.Warn(fmt.Sprintf("the API servers that were known at the last boot: %s: %v", s.o.file, err))
	}
}

// update sets the list to what Kubernetes returned. An empty list is ignored: the server
// that returned it is one itself.
func (s *serverList) update(slice kubeclient.Object) {
	found := Addresses(slice)
	if len(found) == 0 || slices.Equal(found, s.list()) {
		return
	}
	s.log.Info(fmt.Sprintf("the cluster's API servers are at %v", found))
	s.mu.Lock()
	s.servers = found
	s.mu.Unlock()
	s.mark()
	data, err := json.Marshal(found)
	if err == nil {
		if have, rerr := os.ReadFile(s.o.file); rerr == nil && bytes.Equal(have, data) {
			return
		}
		err = boot.WriteFile(s.o.file, data, listMode)
	}
	if err != nil {
		s.log.Warn(fmt.Sprintf("store the list of API servers for the next boot: %v", err))
	}
}

// Addresses are those in an EndpointSlice, sorted.
func Addresses(slice kubeclient.Object) []netip.AddrPort {
	port := uint16(0)
	for _, p := range slice.List("ports") {
		if n, ok := p.At("port").(float64); ok && p.Text("name") == "https" && n > 0 && n < 1<<16 {
			port = uint16(n)
		}
	}
	var found []netip.AddrPort
	for _, endpoint := range slice.List("endpoints") {
		all, _ := endpoint.At("addresses").([]any)
		for _, a := range all {
			text, _ := a.(string)
			if addr, err := netip.ParseAddr(text); err == nil && port > 0 && len(found) < maxServers {
				found = append(found, netip.AddrPortFrom(addr.Unmap(), port))
			}
		}
	}
	slices.SortFunc(found, netip.AddrPort.Compare)
	return slices.Compact(found)
}

// follow keeps the list in step with Kubernetes until ctx ends.
func (s *serverList) follow(ctx context.Context) {
	var client kubeclient.Kept
	pause, logged := time.Duration(0), ""
	for ctx.Err() == nil {
		cfg, err := configuration.Config(s.o.Store)
		joined := untrusted.Exists(s.o.kubeletClient)
		if err == nil {
			how := Client(cfg, map[bool]string{true: s.o.kubeletClient}[joined])
			how.Server = "https://" + s.o.address
			err = client.Use(how)
		}
		if err == nil {
			err = s.watch(ctx, client.Client)
		}
		client.Close()
		switch {
		case !joined:
			pause = joinPoll
		case err == nil:
			pause, logged = againFirst, ""
		case err.Error() != logged && ctx.Err() == nil:
			logged = err.Error()
			s.log.Info(fmt.Sprintf("ask Kubernetes for its API servers: %v", err))
			fallthrough
		default:
			pause = sleep.Longer(pause, againFirst, againMax)
		}
		sleep.For(ctx, pause)
	}
}

// Client are the options of a client of the cluster's API with the rights of this node: through the balancer, as the
// kubelet whose certificate is in a file, or with the token to join; "": there is no certificate yet.
func Client(c *config.Config, certFile string) kubeclient.Options {
	how := kubeclient.Options{Server: URL, ServerName: ServerName, CA: c.Cluster.TrustedCAs(), CertFile: certFile}
	if certFile == "" {
		how.Token = string(c.Cluster.Token)
	}
	return how
}

// watch reads the list, and then its changes for as long as the stream lasts.
func (s *serverList) watch(ctx context.Context, client *kubeclient.Client) error {
	list, err := client.List(ctx, servers, selection)
	if err != nil {
		return err
	}
	for _, slice := range list.Items() {
		s.update(slice)
	}
	err = client.Watch(ctx, servers, selection, list.ResourceVersion(), watchTime, func(e kubeclient.Event) error {
		if e.Type == kubeclient.Added || e.Type == kubeclient.Modified {
			s.update(e.Object)
		}
		return nil
	})
	if kubeclient.IsGone(err) {
		return nil
	}
	return err
}
