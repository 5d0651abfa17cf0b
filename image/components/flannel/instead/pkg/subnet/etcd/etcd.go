// Package etcd is here instead of flannel's: subnets are kept in the Kubernetes API only.
package etcd

import (
	"context"
	"errors"

	"github.com/flannel-io/flannel/pkg/ip"
	"github.com/flannel-io/flannel/pkg/subnet"
)

// EtcdConfig are the options that flannel's main sets.
type EtcdConfig struct {
	Endpoints                                             []string
	Keyfile, Certfile, CAFile, Prefix, Username, Password string
}

// NewLocalManager refuses.
func NewLocalManager(context.Context, *EtcdConfig, ip.IP4Net, ip.IP6Net, int) (subnet.Manager, error) {
	return nil, errors.New("this build keeps subnets in the Kubernetes API only: start it with --kube-subnet-mgr")
}
