// Package services has what a node runs. Two tables are the machine: its services with what
// each depends on, in this file, and its controllers, in purposes.yaml. The
// packages below hold one service or one group of controllers each, and the
// generic ones (dag, resource, operation, process, logs) that know none of them by name.
package services

import (
	"github.com/garboard-os/garboard/services/front/apid"
	"github.com/garboard-os/garboard/services/front/trustd"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/kubernetes/vip"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disks"
	"github.com/garboard-os/garboard/services/system/files"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/resolver"
	"github.com/garboard-os/garboard/services/system/slots"
	"github.com/garboard-os/garboard/services/system/udev"
)

// dependencies has every service of a node, and the services that must be up before it
// starts; it stops before they do. A certificate, or another fact that a service needs, is
// in its package.
var dependencies = map[string][]string{
	udev.ID:          nil,
	apid.ID:          {udev.ID},
	network.ID:       {udev.ID},
	configuration.ID: {udev.ID},
	disks.ID:         {configuration.ID},
	slots.ID:         {disks.ID},
	files.ID:         {disks.ID},
	clock.ID:         {disks.ID, network.ID},
	balancer.ID:      {disks.ID, network.ID},
	resolver.ID:      {disks.ID, network.ID},
	trustd.ID:        {network.ID, clock.ID},
	containerd.ID:    {disks.ID, files.ID, slots.ID},
	etcd.ID:          {containerd.ID, network.ID, clock.ID},
	kubelet.ID:       {containerd.ID, network.ID, clock.ID, balancer.ID},
	vip.ID:           {network.ID, etcd.ID},
}
