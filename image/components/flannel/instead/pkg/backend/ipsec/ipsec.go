// Package ipsec is here instead of flannel's, which needs a daemon of strongSwan.
package ipsec
