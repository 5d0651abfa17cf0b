package balancer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/system/machine"
)

const (
	// listFile is what Kubernetes said last, on STATE.
	listFile = "api-servers.json"
	listMode = 0o600
	// maxServers are taken from it: clusters have three API servers, or five.
	maxServers = 16

	// watchTime is how long one watch goes on; the server ends them after some minutes
	// in any case.
	watchTime = 5 * time.Minute
	// joinLook is how often one looks whether the kubelet has joined, as whom Kubernetes
	// is asked.
	joinLook = time.Second
	// Pauses between tries: the API server may only just start, or be gone for long.
	againFirst = time.Second
	againMax   = 30 * time.Second
)

// slices of default/kubernetes: the manifests of a cluster let nodes read this one.
var (
	servers   = kubeclient.Ref{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice", Namespace: "default"}
	selection = kubeclient.Selection{Fields: "metadata.name=kubernetes"}
)

// known is where the API servers are, as Kubernetes says.
type known struct {
	o    Options
	log  *slog.Logger
	mark func() // wakes who reads the list

	mu      sync.Mutex // guards all below
	servers []netip.AddrPort
}

func (k *known) list() []netip.AddrPort {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.servers
}

// recall reads what was known at the last boot. It is a help: without it there is the
// endpoint.
func (k *known) recall() {
	data, err := os.ReadFile(k.o.file)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var found []netip.AddrPort
	if err == nil {
		err = json.Unmarshal(data, &found)
	}
	if err != nil {
		k.log.Warn(fmt.Sprintf("the API servers that were known at the last boot: %s: %v", k.o.file, err))
		return
	}
	k.servers = found[:min(len(found), maxServers)]
}

// learn takes what Kubernetes says now. That there are none is never true: who says it
// is one.
func (k *known) learn(slice kubeclient.Object) {
	found := addresses(slice)
	if len(found) == 0 || slices.Equal(found, k.list()) {
		return
	}
	k.log.Info(fmt.Sprintf("the cluster's API servers are at %v", found))
	k.mu.Lock()
	k.servers = found
	k.mu.Unlock()
	k.mark()
	data, err := json.Marshal(found)
	if err == nil {
		if have, rerr := os.ReadFile(k.o.file); rerr == nil && bytes.Equal(have, data) {
			return
		}
		err = boot.WriteFile(k.o.file, data, listMode)
	}
	if err != nil {
		k.log.Warn(fmt.Sprintf("keep the API servers for the next boot: %v", err))
	}
}

// addresses are those in an EndpointSlice, sorted.
func addresses(slice kubeclient.Object) []netip.AddrPort {
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
func (k *known) follow(ctx context.Context) {
	var client *kubeclient.Client // kept, for what it has learnt of the API
	var authority []byte
	pause, told := time.Duration(0), ""
	for ctx.Err() == nil {
		if _, err := os.Stat(k.o.kubeletClient); err != nil {
			if !rest(ctx, joinLook) {
				return
			}
			continue
		}
		cfg, err := machine.Config(k.o.Store)
		if err == nil && (client == nil || !bytes.Equal(authority, cfg.Cluster.CA.Crt)) {
			authority = cfg.Cluster.CA.Crt
			client, err = kubeclient.New(kubeclient.Options{
				Server: "https://" + k.o.address, ServerName: ServerName, CA: authority, CertFile: k.o.kubeletClient,
			})
		}
		if err == nil {
			err = k.watch(ctx, client)
		}
		if client != nil {
			client.Close()
		}
		switch {
		case err == nil:
			pause, told = againFirst, ""
		case err.Error() != told && ctx.Err() == nil:
			told = err.Error()
			k.log.Info(fmt.Sprintf("ask Kubernetes for its API servers: %v", err))
			fallthrough
		default:
			pause = min(max(2*pause, againFirst), againMax)
		}
		if !rest(ctx, pause) {
			return
		}
	}
}

func rest(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

// watch reads the list, and then its changes for as long as the stream lasts.
func (k *known) watch(ctx context.Context, client *kubeclient.Client) error {
	list, err := client.List(ctx, servers, selection)
	if err != nil {
		return err
	}
	for _, slice := range list.Items() {
		k.learn(slice)
	}
	err = client.Watch(ctx, servers, selection, list.ResourceVersion(), watchTime, func(e kubeclient.Event) error {
		if e.Type == kubeclient.Added || e.Type == kubeclient.Modified {
			k.learn(e.Object)
		}
		return nil
	})
	if kubeclient.IsGone(err) {
		return nil
	}
	return err
}
