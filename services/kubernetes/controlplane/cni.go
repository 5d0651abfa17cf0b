package controlplane

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	cniFile = "10-flannel.conflist"
	// maxSubnetFile is ample for flannel's six lines.
	maxSubnetFile = 64 << 10
	cniMode       = 0o600 // containerd reads it, and passes it to the plugins
	// cniDataDir is where host-local records used addresses. It is in /run,
	// because after a power cut no pod is left that has one.
	cniDataDir = "/run/cni"
	// cniLater: flannel rewrites its file when the node's subnet or MTU changes,
	// which is rare.
	cniLater = 30 * time.Second
)

// CNIConfigController configures, on every node, how containerd connects pods,
// from the subnet that flannel got for the node. The node is Ready after the
// file exists, so it is written when flannel works, not before.
type CNIConfigController struct{ confDir, subnetFile string }

func (c *CNIConfigController) Reconcile(_ context.Context, v resource.View) (time.Duration, error) {
	o, err := configuration.Configs.Get(v, configuration.ConfigID)
	if err != nil {
		return 0, resource.IgnoreNotFound(err)
	}
	if o.Spec.Cluster.Network.CNI.Name != config.CNIFlannel {
		return 0, nil
	}
	text, err := untrusted.ReadFile(c.subnetFile, maxSubnetFile)
	if errors.Is(err, fs.ErrNotExist) {
		return soon, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read flannel's subnet: %w", err)
	}
	conf, err := cniConfig(string(text))
	if err != nil {
		return 0, fmt.Errorf("flannel's %s: %w", c.subnetFile, err)
	}
	if err := untrusted.MkdirAll(c.confDir, dirMode); err != nil {
		return 0, fmt.Errorf("write CNI configuration: %w", err)
	}
	path := filepath.Join(c.confDir, cniFile)
	wrote, err := untrusted.WriteChanged(path, conf, cniMode)
	if wrote && err == nil {
		v.Log().Info(fmt.Sprintf("writing CNI configuration %q", path))
	}
	return cniLater, err
}

// cniConfig makes the configuration from the lines KEY=VALUE of flannel's file. The bridge
// doesn't masquerade: flannel does, and only for traffic that leaves the pods' network.
func cniConfig(env string) ([]byte, error) {
	values := map[string]string{}
	for line := range strings.Lines(env) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			values[key] = value
		}
	}
	mtu, err := strconv.Atoi(values["FLANNEL_MTU"])
	if err != nil {
		return nil, fmt.Errorf("FLANNEL_MTU: %w", err)
	}
	var ranges, routes list
	for _, family := range []string{"FLANNEL_", "FLANNEL_IPV6_"} {
		if values[family+"SUBNET"] == "" {
			continue
		}
		subnet, err := netip.ParsePrefix(values[family+"SUBNET"])
		if err != nil {
			return nil, fmt.Errorf("%sSUBNET: %w", family, err)
		}
		whole, err := netip.ParsePrefix(values[family+"NETWORK"])
		if err != nil {
			return nil, fmt.Errorf("%sNETWORK: %w", family, err)
		}
		ranges = append(ranges, list{object{"subnet": subnet.Masked().String()}})
		routes = append(routes, object{"dst": whole.Masked().String()})
	}
	if len(ranges) == 0 {
		return nil, errors.New("no subnet in it")
	}
	return json.MarshalIndent(object{
		"cniVersion": "1.0.0",
		"name":       "cbr0",
		"plugins": list{
			object{
				"type": "bridge", "bridge": "cni0", "mtu": mtu, "isDefaultGateway": true, "hairpinMode": true, "ipMasq": false,
				"ipam": object{"type": "host-local", "ranges": ranges, "routes": routes, "dataDir": cniDataDir},
			},
			object{"type": "portmap", "capabilities": object{"portMappings": true}, "backend": "nftables", "snat": true},
		},
	}, "", "  ")
}
