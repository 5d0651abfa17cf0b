// Package udp is here instead of flannel's, which needs a C compiler.
package udp
